"""
Simulation: the scheduler that serves, on a machine that is a formula.

    result = simulate(Workload(n_requests=10_000), Machine(policy="sjf"))

Requests, budgets, cells, prefixes and policies are real; only the seconds of a step come
from a cost model, and time is a number. A result depends on nothing but the arguments.

The engine is a scheduler with options like a real one, and a formula for its steps. The cost of a
step is a sum of what it does, with coefficients fitted to a step log. On the executor of a
simulation every step works, and takes what the cost model says.

Each machine has a clock of its own. The one that is furthest behind goes on next, so a
request is sent when all that comes before it has happened.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import nan
from pathlib import Path
from random import Random
from statistics import median
from traceback import extract_tb
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, NoReturn

from pydantic import Field

from pyllama_raw.api.results import percentile
from pyllama_raw.core.costs import StepCost
from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.core.policies import PolicyAnswerError
from pyllama_raw.core.policy_runner import PolicyFault, pass_on_interrupts
from pyllama_raw.core.request import Event, Finished, FinishReason, Request
from pyllama_raw.core.scheduling.packer import BudgetMode, PrefillOrder
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.core.step import (
    Computed,
    Load,
    Output,
    Sampled,
    Save,
    Saved,
    StepPlan,
    StepResult,
    Verify,
    Work,
)
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.logs import Size, size_of
from pyllama_raw.engine.watcher import PolicyLog, StepRecord, Watcher
from pyllama_raw.errors import ConfigError, PolicyFailed, Unsupported, shown
from pyllama_raw.lab.arrivals import (
    END_TOKEN,
    Answer,
    Guessed,
    Lengths,
    Requests,
    Trace,
    Workload,
)
from pyllama_raw.lab.report import table as aligned
from pyllama_raw.options.frozen import (
    Checked,
    Count,
    NotNegative,
    Positive,
    Whole,
    check_value,
)
from pyllama_raw.policy import make_policy
from pyllama_raw.routing import ROUTERS, RoutedRequest, Router, RouterName, prefixes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


__all__ = [
    "CostModel",
    "Figures",
    "Fit",
    "Guessed",
    "Lengths",
    "Machine",
    "RouterName",
    "Trace",
    "Workload",
    "fit",
    "simulate",
    "table",
    "until_next",
]

HELD_OUT = 5  # every fifth step is not fitted to, but predicted
N_OUTPUTS = 32  # rows with logits in a step, as those of an engine by default
TOKEN_BYTES = 1024  # of a snapshot: with so many it is easy to say what a cache holds


@dataclass(frozen=True, slots=True)
class CostModel(Checked):
    """Seconds, each for one; the defaults stand for no machine that we measured."""

    step: NotNegative = 4e-3
    prefill_token: NotNegative = 1e-3
    decode_token: NotNegative = 2e-3
    context_cell: NotNegative = 1e-7  # that a token looks at
    saved_token: NotNegative = 2e-6
    loaded_token: NotNegative = 2e-6

    def seconds(self, size: Size) -> float:
        """Seconds that a step of *size* takes."""
        return (
            self.step
            + self.prefill_token * size[0]
            + self.decode_token * (size[1] + sum(size[5:]))
            + self.context_cell * size[2]
            + self.saved_token * size[3]
            + self.loaded_token * size[4]
        )

    @classmethod
    def of(cls, cost: StepCost) -> CostModel:
        """Make one of what an engine has learned, `stats().step_cost`, beyond the knee."""
        bend_s = (cost.row_s - cost.wide_row_s) * cost.knee
        token_s = cost.wide_row_s
        return cls(max(cost.fixed_s + bend_s, 0.0), token_s, token_s + cost.output_s)

    def save(self, path: Path) -> None:
        """Write it as a JSON object."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """
        Read what save() has written.

        Raises:
            ConfigError: the file is another one.
        """
        try:
            values = json.loads(path.read_text())
            return cls(**{name: float(value) for name, value in values.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no cost model: {error}") from error


def until_next(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """*steps* of one log, each as long as until the next one, if requests went on."""
    spans = []
    for step, then in zip(steps, [*steps[1:], None], strict=True):
        if then is not None and step.n_running:
            step = step._replace(seconds=then.at_s - step.at_s)  # noqa: PLW2901
        spans.append(step)
    return spans


class Fit(NamedTuple):
    """A cost model and how well it fits."""

    cost: CostModel
    r2: float  # share of the variance that it explains, of the steps it was fitted to
    error: float  # median relative error of single steps that were held out
    total_error: float  # relative error of the time of all of these together
    n_steps: int


def fit(records: Sequence[StepRecord]) -> Fit:
    """
    The least squares fit to *records* in which nothing costs less than nothing.

    Steps that warmed an engine up do not count, nor do those of a draft model. A loaded token costs what restores took, if there were some: core decides by that whether a
    swap is worth it, and whole steps are too noisy to tell.

    Raises:
        ConfigError: there are fewer steps than it takes to know anything.
    """
    import numpy as np

    records = [r for r in records if not (r.warms_up or r.n_draft_model)]
    names = [field.name for field in fields(CostModel)]
    if len(records) < HELD_OUT * len(names):
        n_least = HELD_OUT * len(names)
        raise ConfigError(f"{len(records)} steps are too few: log at least {n_least}")
    # A draft is a row as that of a stream.
    rows = [record.n_decode + record.n_drafted for record in records]
    sizes = np.array([(1, *record[2:7]) for record in records], dtype=float)
    sizes[:, 2] = rows
    seconds = np.array([record.seconds for record in records])
    is_test = np.arange(len(records)) % HELD_OUT == HELD_OUT - 1
    costs = _least_squares(sizes[~is_test], seconds[~is_test], _restore_s(records))
    training, fitted = seconds[~is_test], sizes[~is_test] @ costs
    variance = float(((training - training.mean()) ** 2).sum())
    r2 = 1 - float(((training - fitted) ** 2).sum()) / variance if variance else 1.0
    actual, predicted = seconds[is_test], sizes[is_test] @ costs
    error = median(abs(predicted - actual) / np.maximum(actual, 1e-9))
    total_error = abs(float(predicted.sum() / actual.sum()) - 1)
    model = CostModel(**dict(zip(names, map(float, costs), strict=True)))
    return Fit(model, r2, float(error), total_error, len(records))


def _restore_s(records: Sequence[StepRecord]) -> float | None:
    """Seconds to restore a token; None if none was restored."""
    costs = [r.restore_s / r.n_loaded for r in records if r.restore_s and r.n_loaded]
    return median(costs) if costs else None


def _least_squares(
    sizes: NDArray[np.float64], seconds: NDArray[np.float64], last: float | None
) -> NDArray[np.float64]:
    """Without negative costs: what would have one is left out, the worst first."""
    import numpy as np

    scale = np.maximum(sizes.max(axis=0), 1.0)
    used = list(range(sizes.shape[1] - (last is not None)))
    if last is not None:
        seconds = seconds - last * sizes[:, -1]
    while True:
        costs = np.zeros(sizes.shape[1])
        costs[-1] = last or 0.0
        solution, *_ = np.linalg.lstsq(
            sizes[:, used] / scale[used], seconds, rcond=None
        )
        costs[used] = solution / scale[used]
        if not used or (costs >= 0).all():
            return costs
        used.remove(int((costs * scale).argmin()))


class VirtualClock:
    """Time as a number."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


NEW_TOKENS = (2**16, 2**17)  # of an answer that says something new
ONE_TOKEN, COMPUTED = Sampled((1,)), Computed()


class SimExecutor:
    """
    Counts what is left of each output; core keeps exact account of all else.

    Args:
        token_bytes: host memory of one token of a snapshot.
        repetition: the chance of a token of an output that was not recorded to be the one
            before it; None: all are, because nobody looks at them.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        token_bytes: int = 1,
        repetition: float | None = None,
    ) -> None:
        self._repetition = repetition
        self._texts: dict[int, Random] = {}  # by request_id
        self.n_steps = 0
        self._cost = cost
        self._clock = clock
        self._token_bytes = token_bytes
        self._left: dict[int, int] = {}  # tokens to come, by request_id
        self._answers: dict[int, Answer] = {}

    def open(self, request: Request) -> None:
        if request.source is not None:
            raise Unsupported("simulate", "no formula says what an encoder takes")
        answer = request.sampling
        assert isinstance(answer, Answer)
        self._left[request.request_id] = answer.n_output
        self._answers[request.request_id] = answer
        if self._repetition is not None and not answer.tokens:
            self._texts[request.request_id] = Random(request.request_id)  # noqa: S311

    def close(self, request_id: int) -> None:
        self._left.pop(request_id, None)
        self._answers.pop(request_id, None)
        self._texts.pop(request_id, None)

    def stop(self, request_id: int | None = None) -> None:
        """Steps take no time: none is left to be aborted."""

    def execute(self, plan: StepPlan) -> StepResult:
        self.n_steps += 1
        self._clock.now += self._cost.seconds(size_of(plan))
        outputs = tuple(map(self._output, plan.works))
        if not plan.moves:
            return StepResult(outputs=outputs)
        return StepResult(
            outputs=outputs, saved=self._saved(plan), restore_s=self._restore_s(plan)
        )

    def _output(self, work: Work) -> Output:
        if not work.samples:
            return COMPUTED
        request_id = work[0]
        if type(work) is not Verify and self._repetition is None:
            token = self._next_token(request_id)
            return ONE_TOKEN if token == 1 else Sampled((token,))
        # Drafts are right for as long as the answer goes on with them.
        tokens: list[int] = []
        for draft in (*work.tokens[1:], None) if type(work) is Verify else (None,):
            tokens.append(self._next_token(request_id))
            if tokens[-1] != draft:
                break
        return Sampled(tuple(tokens))

    def _next_token(self, request_id: int) -> int:
        left = self._left[request_id] = self._left[request_id] - 1
        if left < 1:
            return END_TOKEN
        answer = self._answers[request_id]
        n_before = answer.n_output - left - 1
        # A caller may have recorded fewer than came.
        if n_before < len(answer.tokens):
            return answer.tokens[n_before]
        if not n_before:
            return answer.first_token
        text = self._texts.get(request_id)
        is_new = text is not None and text.random() >= (self._repetition or 0.0)
        return text.randrange(*NEW_TOKENS) if text is not None and is_new else 1

    def _saved(self, plan: StepPlan) -> dict[int, Saved]:
        saved = {}
        for move in plan.moves:
            if type(move) is Save and not move.tier.is_file:
                n_bytes = (move.stop - move.start) * self._token_bytes
                if n_bytes <= move.max_bytes:
                    saved[move.save_id] = Saved(None, n_bytes)
        return saved

    def _restore_s(self, plan: StepPlan) -> dict[int, float]:
        """By slot: core decides by them whether a swap is worth it."""
        tokens = {
            move.slot: sum(piece.stop - piece.start for piece in move.pieces)
            for move in plan.moves
            if type(move) is Load
        }
        return {slot: self._cost.loaded_token * n for slot, n in tokens.items()}


Chance = Annotated[float, Field(ge=0, le=1)]
Room = Annotated[int, Field(ge=4, le=2**31 - 1)]  # for a prompt and an output

NO_COST_MODEL = CostModel()


@dataclass(frozen=True, slots=True)
class Machine(Checked):
    """The machine that requests run on."""

    policy: str = "fcfs"
    budget_mode: BudgetMode = "balanced"
    prefill_order: PrefillOrder = "shortest"
    n_slots: Count = 8
    n_ctx_slot: Room = 2048
    n_batch: Count = 2048
    n_cells: Room | None = None  # None: n_ctx_slot for each slot
    token_budget: Count | None = None
    target_step_s: Positive | None = None
    max_overtakes: Whole = 16
    speculation: Literal["off", "lookup"] = "off"
    repetition: Chance = 0.0  # of an output that was not recorded: see SimExecutor
    cached_tokens: Whole = 0  # snapshots in host memory hold at most so many
    cost: CostModel = NO_COST_MODEL

    @property
    def speculates(self) -> bool:
        """Whether steps verify drafts."""
        return self.speculation != "off"

    def scheduler(self, report: Callable[[PolicyFault], None]) -> Scheduler:
        """
        A new one.

        Args:
            report: told of what the policy does wrong.

        Raises:
            ConfigError: there is no such policy.
        """
        n_cells = self.n_cells or self.n_slots * self.n_ctx_slot
        limits = ContextLimits(
            self.n_slots,
            min(self.n_ctx_slot, n_cells),
            self.n_batch,
            n_cells,
            n_outputs=max(N_OUTPUTS, self.n_slots),
        )
        cache = PrefixCache(
            SnapshotKind.RANGE,
            max_bytes=self.cached_tokens * TOKEN_BYTES,
            max_entries=2**16 if self.cached_tokens else 0,
        )
        return Scheduler(
            limits,
            (),  # no simulated request has stop strings
            token_budget=self.token_budget,
            target_step_s=self.target_step_s,
            max_overtakes=self.max_overtakes,
            policy=make_policy(self.policy),
            budget_mode=self.budget_mode,
            prefill_order=self.prefill_order,
            cache=cache,
            snapshot_cost=SnapshotCost(0, TOKEN_BYTES),
            report=report,
            speculates=self.speculates,
        )


OnEnd = Callable[[Request, Finished], None]
OnFault = Callable[[PolicyFault], None]
BLOCK = 64  # tokens, of the prefixes that a router knows


class Simulated:
    """One machine: a driver with its clock, and what is open on it."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        tell: OnEnd,
        on_fault: OnFault,
        watchers: Iterable[Watcher],
    ) -> None:
        self.name = name
        self.clock = clock = VirtualClock()
        self.scheduler = machine.scheduler(on_fault)
        repetition = machine.repetition if machine.speculates else None
        executor = SimExecutor(machine.cost, clock, TOKEN_BYTES, repetition)
        self.driver = Driver(
            self.scheduler, executor, clock, self._take, watchers=watchers
        )
        self.n_cells = self.scheduler.limits.n_cells
        self.n_open = self.n_open_tokens = 0
        self._tell = tell

    def add(self, request: Request, at_s: float) -> None:
        """*request* comes; an idle machine has waited for it."""
        if not self.n_open:
            self.clock.now = max(self.clock.now, at_s)
        self.n_open += 1
        self.n_open_tokens += request.n_prompt + request.max_tokens
        self.driver.add((request,), at_s)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Finished:
                request = self.driver.records[event.request_id].request
                self.n_open -= 1
                self.n_open_tokens -= request.n_prompt + request.max_tokens
                self._tell(request, event)


def simulate(
    workload: Requests,
    machine: Machine,
    *,
    n_replicas: int = 1,
    router: RouterName = "round_robin",
    log: Watcher | None = None,
    watchers: Iterable[Watcher] = (),
    on_end: OnEnd = lambda *_: None,
    keep_going: bool = False,
) -> Figures:
    """
    Run all requests of *workload* to their end.

    Args:
        n_replicas: machines, each like *machine*.
        router: names the rule by which one of them gets a request.
        log: watches the first machine only, as a `StepLog` does.
        watchers: are told of the requests of all machines.
        on_end: called with each request that has ended, and how.
        keep_going: whether the scheduler decides as `fcfs` where a hook of the policy
            fails, as live; then the figures count the faults.

    Raises:
        ConfigError: there is no such policy or router, or no machine.
        PolicyFailed: a hook of the policy failed.
    """
    check_value("n_replicas", n_replicas, Count)
    check_value("router", router, RouterName)
    figures, rule = Figures(machine.policy), ROUTERS[router]()

    def tell(request: Request, end: Finished) -> None:
        figures.add(request, end)
        on_end(request, end)

    watchers = tuple(watchers)
    of_first = watchers if log is None else (*watchers, log)
    on_fault = PolicyLog() if keep_going else _refuse
    replicas = [
        Simulated(str(index), machine, tell, on_fault, watchers if index else of_first)
        for index in range(n_replicas)
    ]
    requests = workload.requests(replicas[0].scheduler.limits.n_ctx_slot)
    coming = next(requests, None)
    while True:
        busy = [replica for replica in replicas if replica.scheduler.alive]
        behind = min(busy, key=lambda replica: replica.clock.now, default=None)
        if coming is not None and (behind is None or coming[0] <= behind.clock.now):
            at_s, request = coming
            target = _choose(rule, request, replicas) if n_replicas > 1 else replicas[0]
            target.add(request, at_s)
            coming = next(requests, None)
        elif behind is None:
            break
        else:
            behind.driver.step()
    for replica in replicas:
        figures.close(replica.scheduler.stats(), replica.clock.now)
    return figures


def _choose(rule: Router, request: Request, replicas: Sequence[Simulated]) -> Simulated:
    """The replica that *request* is sent to."""
    tokens = request.tokens
    blocks = prefixes(tokens.tobytes(), BLOCK * tokens.itemsize)
    summary = RoutedRequest(request.n_prompt + request.max_tokens, blocks)
    replica = replicas[rule.rank(summary, replicas)[0]]
    rule.sent(summary, replica.name)
    return replica


def _refuse(fault: PolicyFault) -> NoReturn:
    pass_on_interrupts(fault)
    error = fault.error
    is_answer = isinstance(error, PolicyAnswerError)
    reason = str(error) if is_answer else f"raised {shown(error)}"
    frames = extract_tb(error.__traceback__)
    # A command shows no traceback, so the place in the policy is told.
    if frames and not is_answer:
        reason += f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}"
    raise PolicyFailed(fault.policy, fault.hook, reason) from error


class Figures:
    """Latencies of all requests, and totals; 32 bytes a request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ttft_s, self.e2e_s = array("d"), array("d")
        self.by_client: dict[str | None, array[float]] = {}  # E2E
        self.n_late = 0  # ended by their deadline, or failed
        self.n_prompt = self.n_cached = self.n_output = self.n_preempted = 0
        self.n_drafted = self.n_accepted = 0
        self.n_faults = 0  # of the policy
        self.end_s = 0.0
        self.n_steps = 0

    def add(self, request: Request, end: Finished) -> None:
        """Take in a request that has ended."""
        times = end.timings
        e2e_s = times.finished - times.submitted
        self.e2e_s.append(e2e_s)
        self.by_client.setdefault(request.client, array("d")).append(e2e_s)
        if times.first_token is not None:
            self.ttft_s.append(times.first_token - times.submitted)
        self.n_late += end.reason in (None, FinishReason.DEADLINE)
        self.n_prompt += end.n_prompt
        self.n_cached += end.n_cached
        self.n_output += end.n_output
        self.n_drafted += end.n_drafted
        self.n_accepted += end.n_accepted

    def close(self, stats: SchedulerStats, now: float) -> None:
        """The last request of one machine has ended."""
        self.n_steps += stats.steps
        self.n_preempted += stats.preempted
        self.n_faults += stats.policy_faults
        self.end_s = max(self.end_s, now)

    @property
    def n_requests(self) -> int:
        return len(self.e2e_s)

    def row(self) -> dict[str, float]:
        """The figures of the table, by the name of their column."""
        medians = [percentile(times, 50) for times in self.by_client.values()]
        n_requests = max(self.n_requests, 1)
        return {
            "tok/s": self.n_output / self.end_s if self.end_s else nan,
            "ttft p50": percentile(self.ttft_s, 50),
            "ttft p99": percentile(self.ttft_s, 99),
            "e2e p50": percentile(self.e2e_s, 50),
            "e2e p99": percentile(self.e2e_s, 99),
            "cached %": 100 * self.n_cached / max(self.n_prompt, 1),
            "late %": 100 * self.n_late / n_requests,
            "unfair x": max(medians) / min(medians) if medians else nan,
            "preempted": self.n_preempted,
            "faults": self.n_faults,
        }


CAPTION = (
    "seconds; late: ended by the deadline; unfair: median E2E of the client that is served "
    "worst over that of the one served best; faults: of hooks of the policy"
)


def table(results: Sequence[Figures]) -> list[str]:
    """A line for each of *results*, under a heading; what the columns mean is below."""
    rows = [{"policy": result.name, **result.row()} for result in results]
    return [*aligned(rows), CAPTION]
