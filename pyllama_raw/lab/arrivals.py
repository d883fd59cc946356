"""
Arrivals of requests, drawn or recorded: times and lengths, for loads and for simulations.

Gaps between requests that are drawn are gamma distributed: a burstiness of 1 is a Poisson process,
below 1 requests come in bursts, above 1 more evenly. An `Arrival` is a recorded request. Files of
recorded requests, traces, are these:

| format | file | prompt | keys or columns |
|---|---|---|---|
| ours | JSONL | text, ids, or so many tokens | at_s, prompt, max_tokens, output, client, ... |
| Mooncake | JSONL | by blocks of 512 tokens | timestamp (ms), *_length, hash_ids |
| Azure LLM | CSV | so many tokens | TIMESTAMP, ContextTokens, GeneratedTokens |
| BurstGPT | CSV | so many tokens | Timestamp (s), Request tokens, Response tokens |
| Vidur | CSV | so many tokens | arrived_at (s), num_prefill_tokens, num_decode_tokens |
| request log | JSONL | by blocks of `block` tokens | submitted_s, n_*, hash_ids, client, ... |

Requests without output (failed when they were recorded) are left out, and those that warmed an
engine up. Times count from the first request. A request log has requests in the order in which
they ended; they are sorted by the time they came.

To a simulation come the requests of a `Workload`, which draws times, lengths, prefixes and clients,
or of a `Trace`, in which equal blocks are equal tokens. Where a trace has the tokens themselves, of
prompts and outputs, drafts are right where they were. A request of either allows as many tokens
as it will get, so a policy that reads `max_tokens` knows the future. Callers do not: they give one
limit to all requests, and at best a guess. So does `Guessed`.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, cast

from pydantic import Field

from pyllama_raw.core.request import Request
from pyllama_raw.engine.logs import RequestRecord, warms_up
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.calls import OPTIONS, Call, Prompt
from pyllama_raw.options.arguments import checked_options
from pyllama_raw.options.frozen import Checked, Count, Factor

Kind = Literal["fixed", "uniform", "exponential", "lognormal"]
POOL = 2**16  # random tokens that prompts are cut from
END_TOKEN = 0  # the last token of every output
FIRST_TOKEN = 2  # those below mean something to the executor
MOST = 2**20  # tokens of one length
Mean = Annotated[float, Field(ge=1, le=MOST, allow_inf_nan=False)]
Sigma = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Prefix = Annotated[int, Field(ge=0, le=MOST)]
MAX_GUESS = 2**31 - 1
MAX_ID = 2**30  # of a recorded token, which leaves room for FIRST_TOKEN
MOONCAKE_BLOCK = 512  # tokens
Row = Mapping[str, Any]


def gaps(rng: Random, rate: float, burstiness: float = 1.0) -> Iterator[float]:
    """
    Seconds from each request to the next one, without end.

    Args:
        rate: requests a second, above 0.
        burstiness: the shape of the gamma distribution, above 0.
    """
    while True:
        yield rng.gammavariate(burstiness, 1 / (rate * burstiness))


def arrival_times(
    rng: Random, n: int, rate: float, burstiness: float = 1.0
) -> list[float]:
    """
    Seconds after the start of *n* requests, in order.

    The last one comes at n / rate for every seed, so runs at one rate last equally long.
    """
    times = list(accumulate(islice(gaps(rng, 1.0, burstiness), n)))
    last = times[-1]
    return [time * (n / rate) / last for time in times] if last > 0 else [0.0] * n


@dataclass(frozen=True, slots=True)
class Lengths(Checked):
    """Whole numbers of one distribution, at least 1 and at most *limit*."""

    mean: Mean
    kind: Kind = "fixed"
    sigma: Sigma = 1.0  # of the logarithm, for lognormal
    limit: Count = MOST

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.mean > self.limit:
            raise ConfigError(f"Lengths.mean={self.mean}: give at most {self.limit}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`200`, `uniform:200`, `exponential:200` or `lognormal:200:0.8`."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            mean, sigma = [*map(float, numbers), 1.0][:2]
            return cls(mean, cast(Kind, kind), sigma)
        except ValueError as error:
            raise ConfigError(f"{text!r} is no distribution: {error}") from error

    def draw(self, rng: Random) -> int:
        """The next one."""
        match self.kind:
            case "fixed":
                number = self.mean
            case "uniform":
                number = rng.uniform(1, 2 * self.mean - 1)
            case "exponential":
                number = rng.expovariate(1 / self.mean)
            case _:
                middle = math.log(self.mean) - self.sigma**2 / 2
                number = rng.lognormvariate(middle, self.sigma)
        return min(max(round(number), 1), self.limit)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; its tokens are known or only how many there are."""

    at_s: float
    n_prompt: int
    n_output: int
    blocks: tuple[int, ...] = ()  # what each block of the prompt is
    prompt: Prompt | None = None  # the prompt itself, where the trace has it
    fields_of_call: Mapping[str, Any] = field(
        default_factory=dict
    )  # other fields of a Call
    block: int = MOONCAKE_BLOCK  # tokens of each of blocks but the last
    max_tokens: int | None = None  # that were allowed; None: n_output
    output: tuple[int, ...] = ()  # its tokens, where the trace has them

    @property
    def asked(self) -> dict[str, Any]:
        """Options of the request."""
        return {
            name: self.fields_of_call[name]
            for name in OPTIONS
            if name in self.fields_of_call
        }


def read(path: Path, limit: int | None = None) -> list[Arrival]:
    """
    The first *limit* requests of a trace file.

    Raises:
        ConfigError: names the line that is not understood.
    """
    arrivals: list[Arrival] = []
    parse = None
    for number, row in _rows(path):
        if len(arrivals) == limit and parse is not logged:
            break
        try:
            values = json.loads(row) if isinstance(row, str) else row
            parse = parse or parser_for(values)
            arrival = parse(values)
            _check_turn(arrival, len(arrivals))
            checked_options(arrival.asked)
        except (KeyError, TypeError, ValueError) as error:
            reason = error if type(error) is ValueError else repr(error)
            raise ConfigError(f"{path}, line {number}: {reason}") from error
        if _counts(arrival):
            arrivals.append(arrival)
    if not arrivals:
        raise ConfigError(f"{path}: no requests in it")
    if parse is logged:
        arrivals.sort(key=_when)
    return _from_first(arrivals[:limit])


class RecordedText(NamedTuple):
    """The tokens of a request."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


NO_TEXTS: Mapping[int, RecordedText] = MappingProxyType({})


def of_log(
    log: Iterable[RequestRecord], texts: Mapping[int, RecordedText] = NO_TEXTS
) -> list[Arrival]:
    """
    The requests of a request log, as read() has them.

    Args:
        texts: by request_id, because a log has none.
    """
    arrivals = []
    for record in log:
        arrival = logged(record._asdict())
        if (text := texts.get(record.request_id)) is not None:
            arrival = replace(arrival, **text._asdict())
        arrivals.append(arrival)
    return _from_first(sorted(filter(_counts, arrivals), key=_when))


def _counts(arrival: Arrival) -> bool:
    """Whether it had output, and did not only warm an engine up."""
    return arrival.n_output >= 1 and not warms_up(
        arrival.fields_of_call.get("policy_data")
    )


def _when(arrival: Arrival) -> float:
    return arrival.at_s


def _from_first(arrivals: list[Arrival]) -> list[Arrival]:
    start = arrivals[0].at_s if arrivals else 0.0
    return [
        replace(arrival, at_s=max(arrival.at_s - start, 0.0)) for arrival in arrivals
    ]


def _check_turn(arrival: Arrival, n_before: int) -> None:
    after = arrival.fields_of_call.get("after")
    if after is not None and not 0 <= after < n_before:
        raise ValueError(f"after={after}: {n_before} requests came before")


def _rows(path: Path) -> Iterable[tuple[int, str | Row]]:
    """Rows of a table, or lines of JSON, with their number in the file."""
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".csv":
            yield from enumerate(csv.DictReader(lines), 2)
        else:
            yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())


def parser_for(row: Row) -> Callable[[Row], Arrival]:
    """By the keys of the first row."""
    for key, parse in PARSERS.items():
        if key in row:
            return parse
    keys = ", ".join(PARSERS)
    raise ValueError(f"columns {sorted(row)}: no known format has them (of {keys})")


MORE_FIELDS = {f.name for f in fields(Call)} - {"prompt", "max_tokens", "at_s"}
OURS = {"at_s", "prompt", "prompt_tokens", "max_tokens", "output", *MORE_FIELDS}


def _ours(row: Row) -> Arrival:
    if unknown := set(row) - OURS:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    values = {key: row[key] for key in MORE_FIELDS if key in row}
    at_s, n_output = float(row.get("at_s", 0.0)), int(row["max_tokens"])
    if n_output < 1:
        raise ValueError(f"max_tokens={n_output}: give 1 or more")
    prompt, output = row.get("prompt"), _ids("output", row.get("output", ()))
    if len(output) > n_output:
        raise ValueError(f"output has {len(output)} tokens, max_tokens is {n_output}")
    if prompt is None:
        n_prompt = int(row["prompt_tokens"])
    else:
        prompt = prompt if isinstance(prompt, str) else _ids("prompt", prompt)
        n_prompt = 0 if isinstance(prompt, str) else len(prompt)
    return Arrival(
        at_s,
        n_prompt,
        len(output) or n_output,
        prompt=prompt,
        fields_of_call=values,
        max_tokens=n_output if output else None,
        output=output,
    )


def _ids(name: str, values: Any) -> tuple[int, ...]:
    """*values* as ids of tokens."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name}: give a list of token ids")
    for value in values:
        if type(value) is not int or not 0 <= value < MAX_ID:
            raise ValueError(f"{name}: {value!r} is no id of a token")
    return tuple(values)


def _mooncake(row: Row) -> Arrival:
    return Arrival(
        float(row["timestamp"]) / 1e3,
        int(row["input_length"]),
        int(row["output_length"]),
        tuple(row["hash_ids"]),
    )


def _columns(at: str, n_prompt: str, n_output: str) -> Callable[[Row], Arrival]:
    """Reads three columns: a moment, which may be missing, and two counts."""

    def parse(row: Row) -> Arrival:
        counts = int(float(row[n_prompt])), int(float(row[n_output]))
        return Arrival(_moment(row.get(at, "0")), *counts)

    return parse


def _moment(text: str) -> float:
    """Seconds, or a date and time."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def logged(row: Row) -> Arrival:
    """A record of a request log; its time is on the clock of the engine."""
    return Arrival(
        float(row["submitted_s"]),
        int(row["n_prompt"]),
        int(row["n_output"]),
        tuple(row["hash_ids"]),
        block=int(row["block"]),
        max_tokens=int(row["max_tokens"]),
        fields_of_call={name: row[name] for name in OPTIONS},
    )


PARSERS: dict[str, Callable[[Row], Arrival]] = {  # by a key that no one before has
    "submitted_s": logged,
    "num_prefill_tokens": _columns(
        "arrived_at", "num_prefill_tokens", "num_decode_tokens"
    ),
    "max_tokens": _ours,
    "hash_ids": _mooncake,
    "ContextTokens": _columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "Request tokens": _columns("Timestamp", "Request tokens", "Response tokens"),
}


class Answer(NamedTuple):
    """The output that a simulated request will have: `Request.sampling` of it."""

    n_output: int
    first_token: int  # of output; prefixes of outputs are shared where these are equal
    tokens: tuple[int, ...] = ()  # all of them, where they were recorded


@dataclass(frozen=True, slots=True)
class Workload(Checked):
    """
    An open loop: requests come whether others have ended or not.
    """

    n_requests: Count = 1000
    rate: Factor = 1.0  # requests a second
    burstiness: Factor = 1.0
    prompt: Lengths = Lengths(200, "lognormal", 0.8)
    output: Lengths = Lengths(50, "exponential")
    n_groups: Count = 1  # prefixes, equally likely
    prefix_tokens: Prefix = 0  # of each; the prompt comes after it
    n_clients: Count = 1
    # Times as many requests as of others come from the first client.
    heavy: Factor = 1.0
    deadline_s: Lengths | None = None  # seconds from arrival
    seed: int = 0

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:
        """
        Requests with the time that each comes at; made one after the other.

        Args:
            n_most: tokens of a prompt and its output together; longer ones are cut.
        """
        rng = Random(self.seed)  # noqa: S311 - it is to be repeated
        pool = make_pool(rng)
        prefixes = [cut(pool, rng, self.prefix_tokens) for _ in range(self.n_groups)]
        weights = [self.heavy, *[1.0] * (self.n_clients - 1)]
        clients = [f"client {number}" for number in range(self.n_clients)]
        coming_s, now = gaps(rng, self.rate, self.burstiness), 0.0
        for request_id in range(self.n_requests):
            now += next(coming_s)
            prefix = prefixes[rng.randrange(self.n_groups)]
            n_output = min(self.output.draw(rng), n_most // 2)
            n_prompt = len(prefix) + self.prompt.draw(rng)
            tail = cut(pool, rng, max(n_prompt - len(prefix), 1))
            tail[0] = FIRST_TOKEN + request_id  # so that no two are equal
            tokens = (prefix + tail)[: n_most - n_output]
            wait_s = None if self.deadline_s is None else self.deadline_s.draw(rng)
            (client,) = rng.choices(clients, weights)
            answer = Answer(n_output, FIRST_TOKEN + request_id)
            yield coming(
                request_id, now, tokens, answer, deadline_s=wait_s, client=client
            )


def coming(
    request_id: int,
    at_s: float,
    tokens: array[int],
    answer: Answer,
    *,
    max_tokens: int = 0,
    deadline_s: float | None = None,
    **options: Any,
) -> tuple[float, Request]:
    """A request and its time; it allows *max_tokens*, or its whole output if that is more."""
    return at_s, Request(
        request_id,
        tokens,
        max_tokens=max(max_tokens, answer.n_output),
        sampling=answer,
        stop_token_ids=frozenset({END_TOKEN}),
        deadline=None if deadline_s is None else at_s + deadline_s,
        **options,
    )


def make_pool(rng: Random) -> array[int]:
    """Random tokens."""
    return array("i", (rng.randrange(FIRST_TOKEN, 2**31) for _ in range(POOL)))


def cut(pool: array[int], rng: Random, n_tokens: int) -> array[int]:
    """Some run of *pool*, repeated where it is too short."""
    start = rng.randrange(POOL)
    tokens = pool[start : start + n_tokens]
    while len(tokens) < n_tokens:
        tokens += pool[: n_tokens - len(tokens)]
    return tokens


@dataclass(frozen=True, slots=True)
class Trace(Checked):
    """
    Arrivals at *speed* times their pace.

    Raises:
        ConfigError: the trace does not say how many tokens a prompt has, or the speed is
            not allowed.
    """

    UNCHECKED = ("arrivals",)
    arrivals: Sequence[Arrival]
    speed: Factor = 1.0

    def __post_init__(self) -> None:
        if any(isinstance(arrival.prompt, str) for arrival in self.arrivals):
            text = "token ids as prompt, or prompt_tokens, instead of a text"
            raise ConfigError(f"a simulation needs {text}")
        Checked.__post_init__(self)

    @classmethod
    def read(
        cls, path: Path, n_requests: int | None = None, speed: float = 1.0
    ) -> Trace:
        """The first *n_requests* of a file in a format that `bench` knows."""
        return cls(read(path, n_requests), speed)

    @classmethod
    def of_log(
        cls,
        log: Iterable[RequestRecord],
        speed: float = 1.0,
        texts: Mapping[int, RecordedText] = NO_TEXTS,
    ) -> Trace:
        """
        The requests of a request log that count, from the first one on.

        Args:
            texts: tokens by request_id, of requests whose drafts are to be as they were.
        """
        return cls(of_log(log, texts), speed)

    @property
    def n_requests(self) -> int:
        """In all."""
        return len(self.arrivals)

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:
        """Like `Workload.requests`."""
        rng = Random(0)  # noqa: S311 - it is to be repeated
        pool, numbers = make_pool(rng), dict[int, int]()
        for request_id, arrival in enumerate(self.arrivals):
            now = arrival.at_s / self.speed
            own = FIRST_TOKEN + 2 * request_id + 1  # begins no block
            n_output = min(arrival.n_output, n_most // 2)
            tokens = _shifted(arrival.prompt or ())
            for block in () if tokens else arrival.blocks:
                number = numbers.setdefault(block, len(numbers))
                n_tokens = min(arrival.block, arrival.n_prompt - len(tokens))
                if n_tokens > 0:
                    tokens += _block(pool, number, n_tokens)
            n_left = arrival.n_prompt - len(tokens)
            if n_left > 0 or not tokens:
                tail = cut(pool, rng, max(n_left, 1))
                tail[0] = own
                tokens += tail
            prompt = tokens[: n_most - n_output]
            answer = Answer(n_output, own, tuple(_shifted(arrival.output)))
            allowed = {"max_tokens": arrival.max_tokens or 0, **arrival.asked}
            yield coming(request_id, now, prompt, answer, **allowed)


def _shifted(prompt: Prompt) -> array[int]:
    """Recorded tokens, none of which means something to the executor."""
    assert not isinstance(prompt, str)
    return array("i", [token + FIRST_TOKEN for token in prompt])


def _block(pool: array[int], number: int, n_tokens: int) -> array[int]:
    """The first tokens of a block; blocks of different numbers begin differently."""
    tokens = cut(pool, Random(number), n_tokens)  # noqa: S311
    tokens[0] = FIRST_TOKEN + 2 * number
    return tokens


Spread = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]


class Requests(Protocol):
    """A `Workload` or a `Trace`, guessed or not."""

    @property
    def n_requests(self) -> int:
        """In all."""

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:
        """Requests of at most *n_most* tokens, each with the time it comes at; in order."""


@dataclass(frozen=True, slots=True)
class Guessed(Checked):
    """
    The requests of *source*, of which a policy sees a guess and one `max_tokens` for all.

    Requests, their times and their outputs are those of *source*.
    """

    UNCHECKED = ("source",)
    source: Requests
    sigma: Spread | None = None
    """
    Deviation of the logarithm of guess / output, which is normal around 0; 0 guesses right.
    None: no guess.
    """
    max_tokens: Count | None = None
    """Output tokens that each request allows; longer outputs end there. None: half a slot."""
    seed: int = 0
    """The seed of the guesses."""

    @property
    def n_requests(self) -> int:
        """In all."""
        return self.source.n_requests

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:
        """Like `Workload.requests`, but a prompt and `max_tokens` may exceed *n_most*."""
        rng = Random(f"guesses {self.seed}")  # noqa: S311 - it is to be repeated
        max_tokens = self.max_tokens or n_most // 2  # no output is longer
        for at_s, request in self.source.requests(n_most):
            data = dict(request.policy_data or {})
            if self.sigma is not None:
                assert isinstance(request.sampling, Answer)
                guess = request.sampling.n_output * rng.lognormvariate(0, self.sigma)
                data["n_output"] = min(max(round(guess), 1), MAX_GUESS)
            yield at_s, replace(request, max_tokens=max_tokens, policy_data=data)
