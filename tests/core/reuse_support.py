"""A scheduler that runs on memory made of lists, for tests of what is reused."""

from array import array

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.core.request import NewTokens, Request
from pyllama_raw.core.step import DecodeStatus, StepPlan, StepResult
from pyllama_raw.engine.driver import Driver
from pyllama_raw.errors import DecodeFailed
from pyllama_raw.testing.executor import HEAD_BYTES, TOKEN_BYTES, FakeMemory
from tests.core.support import STOP_TOKEN, finished, make_scheduler, output

ANSWER = 97  # what every row samples
A, B = list(range(100, 140)), list(range(200, 240))


class Engine:
    """A driver, and the executor that it has; a slot must hold what its text says."""

    def __init__(
        self,
        n_slots=2,
        *,
        max_bytes=10**6,
        max_entries=100,
        interval=0,
        fails=(),
        **options,
    ):
        kind = options.setdefault("kind", SnapshotKind.RANGE)
        self.scheduler = make_scheduler(
            n_slots,
            **options,
            cache=PrefixCache(kind, max_bytes=max_bytes, max_entries=max_entries),
            snapshot_cost=SnapshotCost(HEAD_BYTES, TOKEN_BYTES),
            snapshot_interval_tokens=interval,
        )
        self.fails = fails  # kinds of operations that fail
        self.memory = FakeMemory(
            self.scheduler.limits, lambda op: type(op) in self.fails
        )
        self.texts: dict[int, list[int]] = {}
        self.ends = {}
        self.plans: list[StepPlan] = []
        self._driver = Driver(self.scheduler, self, lambda: 0.0, self._take)

    def add(self, tokens, max_tokens=2, **fields) -> int:
        request_id = len(self.texts)
        fields.setdefault("stop_token_ids", frozenset({STOP_TOKEN}))
        request = Request(request_id, array("i", tokens), max_tokens, **fields)
        self._driver.add([request], 0.0)
        self.texts[request_id] = list(tokens)
        return request_id

    def run(self, *prompts, max_tokens=2, **fields):
        """Run to the end; the last events of *prompts*."""
        ids = [self.add(tokens, max_tokens, **fields) for tokens in prompts]
        while self.step():
            while self.memory.reading:
                self.scheduler.take_report(self.memory.end_fetch())
        return [self.ends[i] for i in ids]

    def step(self, during=lambda: None, *, breaks=False) -> StepPlan:
        """
        One step; its plan is empty if there was nothing to do.

        Args:
            during: called while the step runs.
            breaks: the decode breaks the context, and a new one is made.
        """
        self._during, self._breaks = during, breaks
        n_before = len(self.plans)
        self._driver.step()
        self.scheduler.check_integrity()
        return self.plans[-1] if len(self.plans) > n_before else StepPlan()

    def open(self, request: Request) -> None: ...

    def close(self, request_id: int) -> None: ...

    def stop(self, request_id: int | None = None) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        self.scheduler.check_integrity()
        self.plans.append(plan)
        saved, lost = self.memory.run(plan.moves)
        self._during()
        moved = {"saved": saved, "not_restored": lost}
        if self._breaks:
            self.memory.clear()
            error = DecodeFailed("llama_decode", -3, "injected")
            return StepResult(DecodeStatus.FAILED, error=error, **moved)
        for work in plan.works:
            if work.slot not in lost:
                self._compute(work)
        return StepResult(
            outputs=tuple(output(work, ANSWER, lost=lost) for work in plan.works),
            refuses_cuts=self.memory.refuses_cuts,
            **moved,
        )

    def _compute(self, work) -> None:
        assert work.pos == len(self.memory.tokens(work.slot))
        self.memory.write(work.slot, work.tokens)
        if work.slot not in self.memory.shifted:
            sequence = self.scheduler._roster.alive.get(work.request_id)
            if sequence is None or not sequence.is_shifted:
                held = self.memory.tokens(work.slot)
                assert held == self.texts[work.request_id][: len(held)]

    def _take(self, events) -> None:
        self.ends |= finished(events)
        for event in events:
            if isinstance(event, NewTokens):
                self.texts[event.request_id] += event.tokens

    def of(self, kind) -> list:
        """Operations of *kind*, of all steps."""
        return [op for p in self.plans for op in p.moves if isinstance(op, kind)]

    @property
    def n_computed(self) -> int:
        return self.scheduler.stats().computed_tokens

    @property
    def cache(self):
        return self.scheduler.cache_stats()
