"""
One call, the record of what came back, on the client's clock; how calls are sent; and the result.

Rules:
1. Output has a fixed length (greedy, end-of-generation tokens forbidden), so that all
   targets do the same work. A call that gets another number of tokens has failed.
2. A call that fails is recorded, not raised: failures are part of the result.
3. Calls are sent in a closed loop by so many clients, or in an open loop by the clock. A call that
   follows an earlier turn waits for it in both. In a closed loop a slow target is asked less often;
   in an open loop calls come when they come, and queues grow.

The result of one run is a flat object, with the keys of `vllm bench serve`:
1. Keys that vLLM has mean what they mean there; lists are in the order of the calls.
2. What a target does not tell is null, never 0. A failed call has null in every list.
3. TTFT, TPOT, ITL and E2EL are of completed calls. Output of calls that were left or
   failed counts in the throughput: it was computed.
4. A percentile is a value that occurred: the smallest one that so many per cent do not
   exceed.
5. Rounds of equal conditions are rounds of one thing. Results of other conditions are other
   targets: a table, a plot and a ratio never mix them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import nan
from statistics import fmean, median, pstdev
from time import perf_counter
from typing import Any, Protocol, Self, cast

import anyio

from pyllama_raw.api.results import percentile
from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.options.requests import PolicyData, RequestOptions

Prompt = str | Sequence[int]
OPTIONS = ("priority", "deadline_s", "client", "policy_data")  # options of a request
OnTokens = Callable[["Record"], object]


class CallFailed(Exception):
    """A target did not answer a call as asked."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a workload."""

    prompt: Prompt
    max_tokens: int  # exactly so many are wanted
    at_s: float = 0.0  # open loop: sent so long after the start, or later
    after: int | None = None  # the earlier turn; its text and answer come before prompt
    leave_after: int | None = None  # output tokens after which the client leaves
    kind: str = ""  # calls of one kind also have figures of their own
    priority: int = 0
    deadline_s: float | None = None  # from its sending
    client: str | None = None
    policy_data: PolicyData | None = None

    @property
    def options(self) -> RequestOptions:
        """Further options of the call; only our engine takes them."""
        values = {name: getattr(self, name) for name in OPTIONS}
        options = {
            name: value for name, value in values.items() if value not in (None, 0)
        }
        return cast(RequestOptions, options)


@dataclass(slots=True)
class Record:
    """Times at which the output of one call came, and its tokens."""

    call: Call
    prompt: Prompt  # as it was sent
    sent: float
    times: list[float] = field(default_factory=list)  # of what came together
    counts: list[int] = field(default_factory=list)  # how many tokens that were
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # if the target names them
    n_output: int = 0
    n_prompt: int | None = None  # as the target counts, None if it does not say
    n_cached: int | None = None  # prompt tokens that were not computed
    queue_s: float | None = None  # sent until the target began
    error: str | None = None
    left: bool = False  # the client left, as the workload wanted
    on_tokens: OnTokens | None = None  # called whenever some came

    def take(
        self,
        count: int,
        text: str,
        tokens: Sequence[int] = (),
        at: float | None = None,
    ) -> None:
        """*count* tokens came in, just now or *at* that time."""
        self.times.append(perf_counter() if at is None else at)
        self.counts.append(count)
        self.texts.append(text)
        self.tokens += tokens
        self.n_output += count
        if self.on_tokens is not None:
            self.on_tokens(self)

    @property
    def completed(self) -> bool:
        """All of the output came."""
        return self.error is None and not self.left

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """First token - sent, queueing included."""
        return self.times[0] - self.sent

    @property
    def itl_s(self) -> list[float]:
        """Gaps between what came."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def e2e_s(self) -> float:
        """Last token - sent."""
        return self.times[-1] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None if there is none."""
        if self.n_output < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.n_output - 1)

    def check_length(self) -> None:
        """Raise CallFailed unless the client left or got as many tokens as it asked for."""
        if not self.left and self.n_output != self.call.max_tokens:
            raise CallFailed(f"{self.n_output} tokens came, not {self.call.max_tokens}")


class Target(Protocol):
    """Something that generates."""

    async def send(self, record: Record) -> None:
        """
        Make the call of *record*, and write into it what comes when it comes.

        Raises:
            CallFailed, PyllamaError: the call was refused or went wrong.
        """


async def attempt(target: Target, call: Call, before: Prompt | None = None) -> Record:
    """Make *call*; *before* is what its prompt follows. A failure is in the record."""
    record = Record(call, _joined(before, call.prompt), perf_counter())
    with anyio.CancelScope() as scope:
        if call.leave_after is not None:
            record.on_tokens = lambda record: _leave(record, scope)
        try:
            await target.send(record)
        except (CallFailed, PyllamaError) as error:
            record.error = f"{type(error).__name__}: {error}"
    return record


def _leave(record: Record, scope: anyio.CancelScope) -> None:
    if record.n_output >= (record.call.leave_after or 0):
        record.left = True
        scope.cancel()


def _joined(before: Prompt | None, prompt: Prompt) -> Prompt:
    if before is None:
        return prompt
    if isinstance(before, str) and isinstance(prompt, str):
        return before + prompt
    if isinstance(before, str) or isinstance(prompt, str):
        raise ConfigError("turns of one chat are all text or all token ids")
    return [*before, *prompt]


@dataclass(frozen=True, slots=True)
class Run:
    """The calls of one workload, from the first send to the last token."""

    records: list[Record]  # in the order of the calls
    wall_s: float
    started: float = 0.0  # on the clock of the records
    lag_s: float = 0.0  # open loop: the latest send after its time

    @property
    def n_output(self) -> int:
        return sum(record.n_output for record in self.records)

    @property
    def output_tok_per_s(self) -> float:
        return self.n_output / self.wall_s

    @property
    def n_cached(self) -> int:
        return sum(record.n_cached or 0 for record in self.records)

    def ttft_s(self, percent: float) -> float:
        """A percentile over calls."""
        return percentile((record.ttft_s for record in self.records), percent)

    def checked(self) -> Self:
        """
        Returns:
            This run, for use where every call has to succeed.

        Raises:
            CallFailed: of the first that did not.
        """
        for record in self.records:
            if record.error is not None:
                raise CallFailed(record.error)
        return self


class _Turns:
    """Makes calls, each after the turn it follows."""

    def __init__(self, target: Target, calls: Sequence[Call]) -> None:
        self._target, self._calls = target, calls
        self._done = [anyio.Event() for _ in calls]
        self.records: dict[int, Record] = {}

    async def make(self, index: int) -> None:
        call = self._calls[index]
        before: Prompt | None = None
        if call.after is not None:
            await self._done[call.after].wait()
            before = _said(self.records[call.after])
        self.records[index] = await attempt(self._target, call, before)
        self._done[index].set()

    def run(self, started: float, lag_s: float = 0.0) -> Run:
        wall_s = perf_counter() - started
        records = [self.records[index] for index in range(len(self._calls))]
        return Run(records, wall_s, started, lag_s)


def _said(record: Record) -> Prompt:
    if isinstance(record.prompt, str):
        return record.prompt + record.text
    if len(record.tokens) != record.n_output:
        raise ConfigError("a target that does not name its tokens needs turns as text")
    return [*record.prompt, *record.tokens]


async def closed_loop(target: Target, calls: Sequence[Call], n_clients: int) -> Run:
    """Send *calls* in order; each of *n_clients* waits for its answer, then goes on."""
    turns = _Turns(target, calls)
    waiting = iter(range(len(calls)))

    async def client() -> None:
        for index in waiting:
            await turns.make(index)

    started = perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(n_clients):
            group.start_soon(client)
    return turns.run(started)


async def open_loop(target: Target, calls: Sequence[Call]) -> Run:
    """Send each of *calls* at its time, whatever has become of those before."""
    turns = _Turns(target, calls)
    lag_s = 0.0
    started = perf_counter()
    async with anyio.create_task_group() as group:
        for index in sorted(range(len(calls)), key=lambda i: calls[i].at_s):
            await anyio.sleep(max(started + calls[index].at_s - perf_counter(), 0))
            lag_s = max(lag_s, perf_counter() - started - calls[index].at_s)
            group.start_soon(turns.make, index)
    return turns.run(started, lag_s)


SUMMARY: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "median": median,
    "std": pstdev,
    "p90": partial(percentile, percent=90),
    "p99": partial(percentile, percent=99),
    "max": max,
}

Result = dict[str, Any]
Limits = Mapping[str, float]  # ms, by name: what a request has to keep to count as good


def limits_of(words: Iterable[str]) -> Limits:
    """
    Args:
        words: as "ttft:200", in milliseconds.

    Raises:
        ConfigError: a word is none of these.
    """
    return dict(map(_limit, words))


def _limit(word: str) -> tuple[str, float]:
    name, _, value = word.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = nan
    if name not in ("ttft", "tpot", "e2el") or not limit > 0:
        allowed = "ttft:MS, tpot:MS or e2el:MS, with milliseconds above 0"
        raise ConfigError(f"goodput={word!r}: give {allowed}")
    return name, limit


def _keeps(limits: Limits, record: Record) -> bool:
    """An output of one token has no TPOT, and keeps every limit of it."""
    if not record.completed or not record.times:
        return False
    latencies = {
        "ttft": record.ttft_s,
        "tpot": record.tpot_s or 0,
        "e2el": record.e2e_s,
    }
    return all(latencies[name] * 1e3 <= limit for name, limit in limits.items())


def result_of(run: Run, limits: Limits) -> Result:
    """Figures of *run*, and its calls as lists."""
    return {
        **_counts(run.records, run.wall_s, limits),
        **latencies(run.records),
        "max_start_lag_ms": run.lag_s * 1e3,
        "by_kind": _by_kind(run.records),
        **_lists(run),
    }


def _counts(records: Sequence[Record], wall_s: float, limits: Limits) -> Result:
    completed = [record for record in records if record.completed]
    n_input = _total(n_prompt(record) for record in completed)
    n_cached = _total(record.n_cached for record in completed)
    n_output = sum(record.n_output for record in records)
    n_good = sum(_keeps(limits, record) for record in records)
    return {
        "duration": wall_s,
        "completed": len(completed),
        "failed": sum(record.error is not None for record in records),
        "left": sum(record.left for record in records),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "total_cached_tokens": n_cached,
        "cached_share": n_cached / n_input
        if n_cached is not None and n_input
        else None,
        "request_throughput": len(completed) / wall_s,
        "request_goodput": n_good / wall_s if limits else None,
        "output_throughput": n_output / wall_s,
        "total_token_throughput": (n_input + n_output) / wall_s
        if n_input is not None
        else None,
    }


def latencies(records: Iterable[Record]) -> Result:
    """Mean, median, std, p90, p99 and max of each latency; ITL is pooled over calls."""
    done = [record for record in records if record.completed and record.times]
    values = {
        "ttft": [record.ttft_s for record in done],
        "tpot": [t for record in done if (t := record.tpot_s) is not None],
        "itl": [gap for record in done for gap in record.itl_s],
        "e2el": [record.e2e_s for record in done],
        "queue": [record.queue_s for record in done if record.queue_s is not None],
    }
    paces = [1 / t for t in values["tpot"] if t > 0]
    return {
        "median_decode_tok_per_s": median(paces) if paces else None,
        **{
            f"{figure}_{name}_ms": summary(of_name) * 1e3 if of_name else None
            for name, of_name in values.items()
            for figure, summary in SUMMARY.items()
        },
    }


def _by_kind(records: Sequence[Record]) -> dict[str, Result]:
    """Latencies of the calls of each kind, where a workload has kinds."""
    kinds = dict.fromkeys(record.call.kind for record in records if record.call.kind)
    return {
        kind: latencies(record for record in records if record.call.kind == kind)
        for kind in kinds
    }


def _lists(run: Run) -> Mapping[str, list[Any]]:
    records = run.records
    came = [record if record.times else None for record in records]
    return {
        "input_lens": [n_prompt(record) for record in records],
        "output_lens": [record.n_output for record in records],
        "ttfts": [record and record.ttft_s for record in came],
        "itls": [record and record.itl_s for record in came],
        "latencies": [record and record.e2e_s for record in came],
        "start_times": [record.sent - run.started for record in records],
        "queue_s": [record.queue_s for record in records],
        "kinds": [record.call.kind for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def n_prompt(record: Record) -> int | None:
    """Prompt tokens as the target counts them, or as they were sent."""
    if record.n_prompt is not None or isinstance(record.prompt, str):
        return record.n_prompt
    return len(record.prompt)


def _total(counts: Iterable[int | None]) -> int | None:
    """None if one is not known."""
    numbers = list(counts)
    return None if None in numbers else sum(count or 0 for count in numbers)


CONDITIONS = ("model_id", "workload", "num_prompts", "machine", "options")
# Options that each result has as its target or point, that say how often, or where to log.
KNOWN_FIELDS = {"targets", "peers", "clients", "rate", "burstiness", "rounds"}
KNOWN_FIELDS |= {"step_log", "request_log"}
MOMENT = "machine.date"


def conditions_of(result: Result) -> dict[str, object]:
    """By name, with a dot for what is inside of another one; what is not known is left out."""
    conditions: dict[str, object] = {}
    for key in CONDITIONS:
        value = result.get(key)
        if isinstance(value, dict):
            conditions |= {f"{key}.{name}": value[name] for name in sorted(value)}
        elif value is not None:
            conditions[key] = value
    return conditions


def told_apart(results: Sequence[Result]) -> list[Result]:
    """
    *results*, each with what is its own among them as `apart`, and in the name of its target.

    That is empty if all have the same conditions.
    """
    labels = labels_of(results)
    return [
        result | {"apart": label, "target": _named(result["target"], label)}
        for result, label in zip(results, labels, strict=True)
    ]


def labels_of(results: Sequence[Result]) -> list[str]:
    """The conditions of each that are not those of all, in words."""
    excluded = {f"options.{name}" for name in KNOWN_FIELDS} | {MOMENT}
    conditions = [conditions_of(result) for result in results]
    names = dict.fromkeys(
        name for values in conditions for name in values if name not in excluded
    )
    own = [
        name
        for name in names
        if len({_text(values, name) for values in conditions}) > 1
    ]
    return [
        ", ".join(f"{name.rpartition('.')[2]} {_text(values, name)}" for name in own)
        for values in conditions
    ]


def _text(conditions: dict[str, object], name: str) -> str:
    value = conditions.get(name)
    return "default" if value is None else str(value)


def _named(target: str, label: str) -> str:
    if not label:
        return target
    return f"{target}, {label}" if "=" in target else f"{target}={label}"
