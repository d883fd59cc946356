"""Which texts become vectors next."""

import os
from array import array
from itertools import accumulate

import numpy as np
import pytest

from pyllama_raw.core.embedding.request import EmbedRequest
from pyllama_raw.core.embedding.scheduler import EmbedScheduler
from pyllama_raw.core.limits import ContextLimits
from pyllama_raw.core.request import Embedded, Finished, FinishReason, Lot
from pyllama_raw.core.step import (
    Computed,
    DecodeStatus,
    Encode,
    RowFailed,
    StepPlan,
    StepResult,
    Vector,
)
from pyllama_raw.errors import EmbeddingFailed, InvalidBatch

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "40"))
BUDGET = 10
ERROR = InvalidBatch("llama_decode", -1, "no")
MEAN, LAST = Lot("mean"), Lot("last")


def make_request(
    request_id: int, sizes: list[int], *, may_cut: bool = False, **fields
) -> EmbedRequest:
    """Texts of *sizes*; a token tells its request, its text and its place."""
    tokens = [
        request_id * 10_000 + text * 100 + place
        for text, size in enumerate(sizes)
        for place in range(size)
    ]
    ends = tuple(accumulate(sizes))
    fields.setdefault("lot", MEAN)
    return EmbedRequest(
        request_id, array("i", tokens), 1, ends=ends, may_cut=may_cut, **fields
    )


def make_scheduler(
    *requests: EmbedRequest, n_slots: int = 8, budget: int | None = BUDGET
) -> EmbedScheduler:
    limits = ContextLimits(n_slots=n_slots, n_ctx_slot=100, n_batch=40, n_cells=140)
    scheduler = EmbedScheduler(limits, token_budget=budget)
    scheduler.add_all(requests, 0.0)
    return scheduler


def compute(plan: StepPlan) -> StepResult:
    """The vector of a text is the tokens of its last run."""
    outputs = tuple(
        Vector(work.tokens.tobytes()) if work.is_last else Computed()
        for work in plan.works
        if isinstance(work, Encode)
    )
    return StepResult(outputs=outputs)


def shown(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Request, text and tokens of each work, which are those of its slot."""
    assert [work.slot for work in plan.works] == list(range(len(plan.works)))
    return [
        (work.request_id, work.tokens[0] % 10_000 // 100, len(work.tokens))
        for work in plan.works
    ]


def run(scheduler: EmbedScheduler) -> tuple[list[list[tuple[int, int, int]]], list]:
    """All steps and all events."""
    steps, events = [], scheduler.take_events()
    while plan := scheduler.schedule(0.0):
        steps.append(shown(plan))
        events += scheduler.apply(plan, compute(plan), 1.0)
    return steps, events


def ends_of(events: list) -> dict[int, object]:
    """Why each request ended."""
    ends = [event for event in events if isinstance(event, Finished)]
    return {end.request_id: end.error or end.reason for end in ends}


def test_a_watcher_is_told_when_a_request_is_first_computed():
    """
    Once a request, however many steps its texts take.
    """
    scheduler, notes = make_scheduler(make_request(3, [8, 8])), []
    scheduler.watch(lambda *note: notes.append(note))

    for now in (1.0, 2.0):
        plan = scheduler.schedule(now)
        scheduler.apply(plan, compute(plan), now)

    assert notes == [("running", 3, 1.0)]


def test_texts_share_steps_in_their_order():
    """
    A step takes texts until one does not fit, and vectors come in the order of texts.
    """
    scheduler = make_scheduler(make_request(1, [4, 4, 4, 9]))

    steps, events = run(scheduler)

    assert steps == [[(1, 0, 4), (1, 1, 4)], [(1, 2, 4)], [(1, 3, 9)]]
    assert [event.index for event in events[:-1]] == [0, 1, 2, 3]
    assert ends_of(events) == {1: FinishReason.STOP}
    assert not scheduler.has_work


def test_a_text_longer_than_a_step_goes_alone():
    """
    What may not be cut is computed at once, with nothing beside it.
    """
    scheduler = make_scheduler(make_request(1, [25, 2]))

    steps, _ = run(scheduler)

    assert steps == [[(1, 0, 25)], [(1, 1, 2)]]


def test_a_text_that_may_be_cut_goes_on_first():
    """
    Its runs follow each other in slot 0, and others fill the rest of its last step.
    """
    scheduler = make_scheduler(
        make_request(1, [25], may_cut=True), make_request(2, [3, 3], may_cut=True)
    )

    plans = []
    while plan := scheduler.schedule(0.0):
        plans.append(plan)
        scheduler.apply(plan, compute(plan), 1.0)

    assert [shown(plan) for plan in plans] == [
        [(1, 0, 10)],
        [(1, 0, 10)],
        [(1, 0, 5), (2, 0, 3)],
        [(2, 1, 3)],
    ]
    first = [(plan.works[0].pos, plan.works[0].is_last) for plan in plans[:3]]
    assert first == [(0, False), (10, False), (20, True)]


def test_requests_take_turns():
    """
    A request with one text is served beside one with many that came first.
    """
    scheduler = make_scheduler(make_request(1, [5] * 9), make_request(2, [5]))

    steps, _ = run(scheduler)

    assert steps[0] == [(1, 0, 5), (2, 0, 5)]
    assert steps[1] == [(1, 1, 5), (1, 2, 5)]


def test_who_was_not_served_is_first():
    """
    Of three requests, two of which fill a step, each is in one of two steps.
    """
    scheduler = make_scheduler(*(make_request(i, [5] * 4) for i in range(3)))

    steps, _ = run(scheduler)

    assert [{who for who, _, _ in step} for step in steps] == [
        {0, 1}, {2, 0}, {1, 2}, {0, 1}, {2, 0}, {1, 2},
    ]  # fmt: skip


def test_a_lower_priority_number_is_first():
    """
    Others fill what it leaves.
    """
    scheduler = make_scheduler(
        make_request(1, [5] * 3), make_request(2, [6, 6], priority=-1)
    )

    steps, _ = run(scheduler)

    assert steps == [[(2, 0, 6)], [(2, 1, 6)], [(1, 0, 5), (1, 1, 5)], [(1, 2, 5)]]


def test_lots_take_turns():
    """
    Texts that are pooled in another way are in steps of their own.
    """
    scheduler = make_scheduler(
        make_request(1, [9, 9]), make_request(2, [9, 9], lot=LAST, may_cut=True)
    )

    steps, _ = run(scheduler)

    assert [step[0][0] for step in steps] == [1, 2, 1, 2]


def test_a_text_that_was_cut_keeps_its_lot():
    """
    No other lot comes between the runs of a text.
    """
    scheduler = make_scheduler(
        make_request(1, [25], lot=LAST, may_cut=True), make_request(2, [9, 9])
    )

    steps, _ = run(scheduler)

    assert [step[0][0] for step in steps] == [1, 1, 1, 2, 2]


def test_slots_limit_the_texts_of_a_step():
    """
    A step has no more texts than there are slots.
    """
    scheduler = make_scheduler(make_request(1, [1] * 5), n_slots=2)

    steps, _ = run(scheduler)

    assert [len(step) for step in steps] == [2, 2, 1]


def test_a_request_can_be_cancelled():
    """
    It ends at once, also with a part of a text computed; the others go on.
    """
    scheduler = make_scheduler(
        make_request(1, [25], may_cut=True), make_request(2, [5])
    )
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, compute(plan), 0.0)

    assert scheduler.cancel(1, 0.0)
    assert not scheduler.cancel(1, 0.0)
    steps, events = run(scheduler)

    assert steps == [[(2, 0, 5)]]
    assert ends_of(events) == {1: FinishReason.CANCELLED, 2: FinishReason.STOP}


def test_a_request_can_be_failed():
    """
    It ends with the error; it has no spans to be told of.
    """
    scheduler = make_scheduler(make_request(0, [2]))
    error = InvalidBatch("llama_decode", -1, "as told")

    told = [scheduler.fail(0, error, 1.0), scheduler.fail(0, error, 1.0)]

    assert told == [True, False]
    assert ends_of(scheduler.take_events()) == {0: error}
    assert not scheduler.media_ready(0, 1)
    assert (scheduler.spare(0), scheduler.take_wanted()) == (0, [])


def test_a_deadline_ends_a_request():
    """
    It is told with the first step after it.
    """
    scheduler = make_scheduler(make_request(1, [5], deadline=3.0))

    assert scheduler.next_deadline == 3.0
    assert not scheduler.schedule(3.0)
    assert ends_of(scheduler.take_events()) == {1: FinishReason.DEADLINE}
    assert scheduler.next_deadline is None


def test_an_aborted_step_is_repeated():
    """
    A text that was cut begins anew, because nobody knows what is left of it.
    """
    scheduler = make_scheduler(make_request(1, [25], may_cut=True))
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, compute(plan), 0.0)
    plan = scheduler.schedule(0.0)

    scheduler.apply(plan, StepResult(DecodeStatus.ABORTED), 0.0)

    assert shown(scheduler.schedule(0.0)) == [(1, 0, 10)]
    assert scheduler.schedule(0.0).works[0].pos == 0


@pytest.mark.parametrize("status", [DecodeStatus.FAILED, DecodeStatus.INVALID])
def test_after_a_failure_texts_are_computed_alone(status):
    """
    The one that fails again ends its request; all others have their vectors.
    """
    scheduler = make_scheduler(*(make_request(i, [2, 2]) for i in range(3)))
    events = []

    while plan := scheduler.schedule(0.0):
        wrong = any(who == 1 and text == 1 for who, text, _ in shown(plan))
        result = StepResult(status, error=ERROR) if wrong else compute(plan)
        events += scheduler.apply(plan, result, 1.0)

    assert ends_of(events) == {0: FinishReason.STOP, 1: ERROR, 2: FinishReason.STOP}
    assert [
        e.index for e in events if isinstance(e, Embedded) and e.request_id == 1
    ] == [0]
    assert scheduler.stats().failed_steps >= 2


def test_a_row_that_failed_ends_its_request_only():
    """
    Its other texts in the step count for nothing.
    """
    error = EmbeddingFailed()
    scheduler = make_scheduler(make_request(1, [2, 2]), make_request(2, [2, 2]))
    plan = scheduler.schedule(0.0)
    assert shown(plan) == [(1, 0, 2), (2, 0, 2), (1, 1, 2), (2, 1, 2)]
    outputs = (RowFailed(error), *compute(plan).outputs[1:])

    events = scheduler.apply(plan, StepResult(outputs=outputs), 1.0)

    assert ends_of(events) == {1: error, 2: FinishReason.STOP}
    assert scheduler.stats().failed == 1


def test_the_budget_follows_the_speed():
    """
    A step takes half of the target, because streams of others have steps of their own.
    """
    limits = ContextLimits(n_slots=8, n_ctx_slot=100, n_batch=1000, n_cells=1100)
    scheduler = EmbedScheduler(limits, target_step_s=1.0)
    scheduler.add_all([make_request(1, [16] * 99)], 0.0)
    sizes = []

    for _ in range(2):
        plan = scheduler.schedule(0.0)
        sizes.append(plan.n_tokens)
        scheduler.apply(plan, compute(plan), plan.n_tokens / 200)

    assert sizes == [64, 96]  # tokens, at 200 a second


def test_stats_count_requests_and_tokens():
    """
    A request runs once it was in a step.
    """
    scheduler = make_scheduler(make_request(1, [9, 9]), make_request(2, [9]))

    before = scheduler.stats()
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, compute(plan), 1.0)
    after = scheduler.stats()

    assert (before.running, before.waiting, before.waiting_tokens) == (0, 2, 27)
    assert (after.running, after.waiting, after.waiting_tokens) == (1, 1, 9)
    assert (after.submitted, after.steps, after.computed_tokens) == (2, 1, 9)
    assert after.finished["stop"] == 0


def test_nothing_is_kept_of_requests():
    """
    There is no cache, and no file.
    """
    scheduler = make_scheduler()

    assert (scheduler.cache_stats().n_entries, scheduler.clear_cache()) == (0, 0)
    assert (list(scheduler.last_plans()), scheduler.schedule(0.0)) == ([], StepPlan())
    assert scheduler.take_report(None) is None


class History:
    """A scheduler among callers who come and leave, and steps that fail."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.scheduler = make_scheduler(n_slots=int(self.rng.integers(1, 7)))
        self.requests: dict[int, EmbedRequest] = {}
        self.vectors: dict[int, list[int]] = {}  # which texts have one
        self.ends: dict[int, object] = {}

    def happens(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    def come(self) -> None:
        request_id, may_cut = len(self.requests), self.happens(0.4)
        sizes = self.rng.integers(1, 31, self.rng.integers(1, 7)).tolist()
        lot = LAST if may_cut else MEAN
        request = make_request(request_id, sizes, may_cut=may_cut, lot=lot)
        self.scheduler.add_all([request], 0.0)
        self.requests[request_id], self.vectors[request_id] = request, []

    def step(self, *, well: bool) -> bool:
        plan = self.scheduler.schedule(0.0)
        if plan:
            self.check(plan)
            result = compute(plan)
            if not well and self.happens(0.1):
                result = StepResult(DecodeStatus.ABORTED)
            elif not well and self.happens(0.1):
                result = StepResult(DecodeStatus.FAILED, error=ERROR)
            self.take(self.scheduler.apply(plan, result, 1.0))
        return bool(plan)

    def take(self, events: list) -> None:
        for event in events:
            if isinstance(event, Embedded):
                self.vectors[event.request_id].append(event.index)
        self.ends |= ends_of(events)

    def check(self, plan: StepPlan) -> None:
        works = plan.works
        assert {self.requests[work.request_id].lot for work in works} == {plan.lot}
        assert len(works) <= self.scheduler.limits.n_slots
        assert plan.n_tokens <= BUDGET or len(works) == 1
        assert [work.slot for work in works] == list(range(len(works)))
        assert all((work.pos, work.is_last) == (0, True) for work in works[1:])


@pytest.mark.parametrize("seed", range(N_CASES))
def test_random_histories_keep_the_rules(seed):
    """
    No step mixes lots or breaks a limit; every request ends, with vectors in their order.
    """
    history = History(seed)
    for _ in range(40):
        if history.happens(0.5):
            history.come()
        if history.requests and history.happens(0.1):
            someone = int(history.rng.integers(len(history.requests)))
            history.scheduler.cancel(someone, 0.0)
        history.step(well=False)
        history.take(history.scheduler.take_events())
    while history.step(well=True):
        pass

    assert history.ends.keys() == history.requests.keys()
    for request_id, request in history.requests.items():
        n_vectors = len(history.vectors[request_id])
        assert history.vectors[request_id] == list(range(n_vectors))
        if history.ends[request_id] is FinishReason.STOP:
            assert n_vectors == len(request.ends)
