"""Random histories of the scheduler against a model of the context's memory."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pyllama_raw.core.request import Delta
from pyllama_raw.core.step import DecodeStatus, StepPlan, StepResult
from pyllama_raw.errors import (
    DecodeFailed,
    InvalidBatch,
    PromptTooLong,
    QueueFull,
    SamplingFailed,
)
from tests.core.support import (
    STOP_TOKEN,
    answer,
    finished,
    make_request,
    make_scheduler,
)

N_SLOTS, N_CTX_SLOT, N_BATCH, N_CELLS = 3, 24, 16, 40


class SchedulerModel(RuleBasedStateMachine):
    """Each request ends exactly once; each plan is what the memory can take."""

    @initialize(
        unified=st.booleans(),
        budget=st.sampled_from([None, 1, 5, 16]),
        shift=st.booleans(),
        quantum=st.integers(1, 8),
    )
    def start(self, unified, budget, shift, quantum):
        self.unified = unified
        self.scheduler = make_scheduler(
            N_SLOTS,
            N_CTX_SLOT,
            N_BATCH,
            N_CELLS if unified else N_SLOTS * N_CTX_SLOT,
            unified=unified,
            token_budget=budget,
            prefill_quantum=quantum,
            context_full="shift" if shift else "stop",
            n_keep=1,
            max_waiting=6,
            max_overtakes=2,
        )
        self.now = 0.0
        self.memory = [[] for _ in range(N_SLOTS)]
        self.added = set()
        self.events = []
        self.plan = None

    @rule(
        n_prompt=st.integers(1, N_CTX_SLOT + 1),
        max_tokens=st.integers(1, 40),
        priority=st.integers(-1, 1),
        patience=st.none() | st.integers(0, 30),
    )
    def add(self, n_prompt, max_tokens, priority, patience):
        request = make_request(
            len(self.added) + 1000,
            n_prompt,
            max_tokens,
            priority=priority,
            deadline=None if patience is None else self.now + patience,
        )
        try:
            self.scheduler.add(request, self.now)
        except (PromptTooLong, QueueFull):
            return
        self.added.add(request.request_id)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.added)))
        ended = request_id in finished(self.events)
        self.events += self.scheduler.take_events()
        ended = request_id in finished(self.events)

        assert self.scheduler.cancel(request_id, self.now) is not ended

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self):
        self.now += 1.0
        self.plan = self.scheduler.schedule(self.now)
        self.events += self.scheduler.take_events()
        self.check_plan(self.plan)

    def check_plan(self, plan: StepPlan):
        assert plan.n_tokens <= N_BATCH
        slots = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots)
        sizes = [len(chunk.tokens) for chunk in plan.chunks]
        n_decodes = sum(c.wants_output and len(c.tokens) == 1 for c in plan.chunks)
        assert min(sizes, default=1) >= 1
        assert all(size == 1 for size in sizes[:n_decodes]) or n_decodes == 0
        if self.scheduler.has_work and not self.scheduler.stats().waiting:
            assert plan.chunks

    def prepare(self, plan: StepPlan):
        for slot in plan.releases:
            self.memory[slot] = []
        for trim in plan.trims:
            assert len(self.memory[trim.slot]) >= trim.n_tokens
            del self.memory[trim.slot][trim.n_tokens :]
        for shift in plan.shifts:
            cells = self.memory[shift.slot]
            assert len(cells) >= shift.n_keep + shift.n_discard
            del cells[shift.n_keep : shift.n_keep + shift.n_discard]
        for chunk in plan.chunks:
            assert chunk.pos == len(self.memory[chunk.slot])

    def write(self, plan: StepPlan, n_tokens: int | None = None):
        left = plan.n_tokens if n_tokens is None else n_tokens
        for chunk in plan.chunks:
            taken = list(chunk.tokens)[:left]
            left -= len(taken)
            self.memory[chunk.slot] += taken
        used = sum(map(len, self.memory))
        assert used <= (N_CELLS if self.unified else N_SLOTS * N_CTX_SLOT)
        assert all(len(cells) <= N_CTX_SLOT for cells in self.memory)

    def finish_step(self, result: StepResult):
        plan, self.plan = self.plan, None
        self.now += 0.5
        self.events += self.scheduler.apply(plan, result, self.now)

    @precondition(lambda self: self.plan is not None)
    @rule(token=st.sampled_from([97, 97, 97, STOP_TOKEN]))
    def succeed(self, token):
        self.prepare(self.plan)
        self.write(self.plan)
        self.finish_step(answer(self.plan, token))

    @precondition(lambda self: self.plan)
    @rule(data=st.data())
    def fail_one_row(self, data):
        self.prepare(self.plan)
        self.write(self.plan)
        rows = [c.request_id for c in self.plan.chunks if c.wants_output]
        bad = data.draw(st.sampled_from(rows)) if rows else None
        tokens = tuple(None if row == bad else 97 for row in rows)
        errors = {bad: SamplingFailed("llama_sampler_sample", None, "injected")}
        self.finish_step(StepResult(tokens=tokens, row_errors=errors))

    @precondition(lambda self: self.plan and self.plan.chunks)
    @rule()
    def find_no_space(self):
        self.prepare(self.plan)
        self.finish_step(StepResult(DecodeStatus.NO_SPACE))

    @precondition(lambda self: self.plan and self.plan.chunks)
    @rule(data=st.data(), recurrent=st.booleans())
    def abort(self, data, recurrent):
        self.prepare(self.plan)
        self.write(self.plan, data.draw(st.integers(0, self.plan.n_tokens)))
        if recurrent:
            for chunk in self.plan.chunks:
                self.memory[chunk.slot] = []
        kept = {c.slot: len(self.memory[c.slot]) for c in self.plan.chunks}
        self.finish_step(StepResult(DecodeStatus.ABORTED, n_computed=kept))

    @precondition(lambda self: self.plan and self.plan.chunks)
    @rule(fatal=st.booleans())
    def fail(self, fatal):
        self.prepare(self.plan)
        if fatal:
            self.memory = [[] for _ in range(N_SLOTS)]
            error = DecodeFailed("llama_decode", -3, "injected")
            self.finish_step(StepResult(DecodeStatus.FAILED, error=error))
        else:
            error = InvalidBatch("llama_decode", -1, "injected")
            self.finish_step(StepResult(DecodeStatus.INVALID, error=error))

    @invariant()
    def laws_hold(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert set(finished(self.events)) <= self.added

    def teardown(self):
        """Left alone, everything that was added comes to its end."""
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.succeed(97)
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.schedule()
            self.succeed(97)
        self.events += self.scheduler.take_events()
        assert set(finished(self.events)) == self.added
        counts = dict.fromkeys(self.added, 0)
        for event in self.events:
            if isinstance(event, Delta):
                counts[event.request_id] += 1
        assert counts == {i: e.n_output for i, e in finished(self.events).items()}


SchedulerModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestSchedulerModel = SchedulerModel.TestCase
