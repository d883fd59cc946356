"""After a failed decode all requests go on; only who is sure to be the cause ends."""

import os
from random import Random

import pytest

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import Finished, FinishReason, Request
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import (
    Decode,
    DecodeStatus,
    PartlyComputed,
    Prefill,
    StepResult,
)
from pyllama_raw.errors import DecodeFailed
from pyllama_raw.testing import FakeExecutor
from tests.core.reuse_support import Engine
from tests.core.support import Pieces, make_request, make_scheduler, shape, step

FAILED, INVALID = DecodeStatus.FAILED, DecodeStatus.INVALID
N_HISTORIES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "20"))
N_STREAMS = 8
MAX_STEPS = 3000
UNIFIED = {"unified": True, "deterministic": False, "kind": SnapshotKind.RANGE}
SPLIT = {"unified": False, "deterministic": True, "kind": SnapshotKind.STATE}
WHOLE = {"unified": False, "deterministic": True, "kind": SnapshotKind.EXACT}
LAYOUTS = pytest.mark.parametrize("layout", [UNIFIED, SPLIT, WHOLE])
STATUSES = pytest.mark.parametrize("status", [FAILED, INVALID])


def make_limits(*, n_slots=N_STREAMS, **layout) -> ContextLimits:
    return ContextLimits(n_slots, 64, 64, n_slots * 64, **layout)


def make_requests(n_requests=N_STREAMS, max_tokens=6) -> list[Request]:
    return [make_request(i, 3 + 2 * i, max_tokens) for i in range(n_requests)]


class Served:
    """What came of requests that were all there at the start."""

    def __init__(self, requests, limits, budget=16, **failing) -> None:
        executor = FakeExecutor(limits, **failing)
        scheduler = Scheduler(limits, Pieces(), token_budget=budget)
        self.tokens = {r.request_id: [] for r in requests}
        self.errors = {}
        for request in requests:
            executor.open(request)
            scheduler.add(request, 0.0)
        while plan := scheduler.schedule(0.0):
            assert executor.n_steps < MAX_STEPS
            self._take(scheduler.apply(plan, executor.execute(plan), 0.0))
            self._take(scheduler.take_events())
            scheduler.check_integrity()
        self.decodes = [k for k, plan in enumerate(executor.plans) if plan.works]
        self.stats = scheduler.stats()
        assert not scheduler.alive

    def _take(self, events) -> None:
        for event in events:
            if not isinstance(event, Finished):
                self.tokens[event.request_id] += event.tokens
            elif event.error is not None:
                self.errors[event.request_id] = event.error

    @property
    def failures(self) -> tuple[int, int]:
        return self.stats.failed_steps, self.stats.rebuilds


@pytest.mark.unwatched
@LAYOUTS
@STATUSES
def test_a_decode_that_fails_once_loses_nothing(layout, status):
    """
    Whichever step of eight streams it is: no error, and the tokens of an undisturbed run.
    """
    requests, limits = make_requests(), make_limits(**layout)
    whole = Served(requests, limits)

    served = [Served(requests, limits, failures={k: status}) for k in whole.decodes]

    n_rebuilds = int(status is FAILED)
    assert [run.errors for run in served] == [{}] * len(served)
    assert [run.tokens for run in served] == [whole.tokens] * len(served)
    assert {run.failures for run in served} == {(1, n_rebuilds)}


@pytest.mark.unwatched
@LAYOUTS
@STATUSES
def test_only_who_always_fails_ends(layout, status):
    """
    The others get all their tokens, and few decodes are spent to find out.
    """
    requests, limits = make_requests(), make_limits(**layout)
    whole = Served(requests, limits)

    for culprit in range(N_STREAMS):
        run = Served(requests, limits, poison={culprit: status})

        assert list(run.errors) == [culprit]
        assert run.tokens == whole.tokens | {culprit: []}
        assert run.stats.failed_steps <= 4


def test_several_culprits_end_and_nobody_else():
    """
    Each is found, and the rest is as if they had not been there.
    """
    requests, limits = make_requests(), make_limits(**UNIFIED)
    whole = Served(requests, limits)

    run = Served(requests, limits, poison={1: FAILED, 4: INVALID, 5: FAILED})

    assert sorted(run.errors) == [1, 4, 5]
    assert run.tokens == whole.tokens | {1: [], 4: [], 5: []}


@STATUSES
def test_a_context_that_always_fails_ends_all(status):
    """
    Every request ends with the error of libllama, after a bounded number of steps.
    """
    always = dict.fromkeys(range(N_STREAMS), status)

    run = Served(make_requests(), make_limits(**UNIFIED), poison=always)

    assert sorted(run.errors) == list(range(N_STREAMS))
    assert run.stats.failed_steps <= 4 * N_STREAMS


def test_what_only_fails_together_is_done_alone():
    """
    Then nobody ends, and the failures grow with the logarithm of the tokens.
    """
    requests, limits = make_requests(4, max_tokens=40), make_limits(**UNIFIED)
    whole = Served(requests, limits)
    executor = FakeExecutor(limits)
    scheduler = Scheduler(limits, Pieces(), token_budget=16)
    tokens = {r.request_id: [] for r in requests}
    for request in requests:
        executor.open(request)
        scheduler.add(request, 0.0)

    while plan := scheduler.schedule(0.0):
        if len(plan.works) > 1:
            executor.memory.clear()
            result = StepResult(FAILED, error=DecodeFailed("fake", -2, "too large"))
        else:
            result = executor.execute(plan)
        for event in scheduler.apply(plan, result, 0.0):
            if isinstance(event, Finished):
                assert event.error is None
            else:
                tokens[event.request_id] += event.tokens

    assert tokens == whole.tokens
    assert scheduler.stats().rebuilds <= 12


@pytest.mark.unwatched
@pytest.mark.chance
@pytest.mark.parametrize("seed", range(4))
def test_no_history_of_failures_loses_a_token(seed):
    """
    Steps that fail now and then, and others that are aborted, cost work and nothing else.
    """
    rng = Random(seed)  # noqa: S311
    for _ in range(N_HISTORIES // 4):
        layout = rng.choice([UNIFIED, SPLIT, WHOLE])
        limits = make_limits(n_slots=rng.randrange(1, 5), **layout)
        requests = make_requests(rng.randrange(1, 7), rng.randrange(1, 40))

        run = Served(requests, limits, rng.choice([4, 16]), failures=draw_failures(rng))

        assert run.tokens == Served(requests, limits).tokens
        assert run.errors == {}


def draw_failures(rng) -> dict[int, DecodeStatus]:
    """Steps that fail lie so far apart that all get past one before the next."""
    share = rng.choice([0.0, 0.1, 0.3])
    aborted = {
        k: DecodeStatus.ABORTED for k in range(MAX_STEPS) if rng.random() < share
    }
    failed, k = {}, rng.randrange(60)
    while k < MAX_STEPS:
        failed[k] = rng.choice([FAILED, INVALID])
        k += rng.randrange(300, 400)
    return aborted | failed


def fail(scheduler, plan, status=FAILED, code=-3, **fields):
    error = DecodeFailed("llama_decode", code, "injected")
    return scheduler.apply(plan, StepResult(status, error=error, **fields), 1.0), error


def test_who_fails_alone_twice_ends():
    """
    A request with nobody beside it is tried once more, and then its error is known.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0), 0.0)
    first, _ = fail(scheduler, scheduler.schedule(0.0))

    [end], error = fail(scheduler, scheduler.schedule(0.0))

    assert first == []
    assert (end.error, end.reason) == (error, None)


def test_who_has_got_on_may_fail_again():
    """
    Failures count from the last place that was passed, however many there were before.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, max_tokens=9), 0.0)

    ends = []
    for _ in range(8):
        events, _ = fail(scheduler, scheduler.schedule(0.0))
        ends += events
        step(scheduler)

    assert ends == []
    assert scheduler.stats().failed_steps == 8


def test_a_suspect_is_computed_alone_until_it_is_past():
    """
    After a second failure in a row each step has one sequence, by rank.
    """
    scheduler = make_scheduler(n_slots=3)
    for request_id in range(3):
        scheduler.add(make_request(request_id, n_prompt=4), 0.0)
    for _ in range(2):
        fail(scheduler, scheduler.schedule(0.0))

    plans = [step(scheduler)[0] for _ in range(4)]

    assert [[c.request_id for c in p.works] for p in plans] == [
        [0],
        [1],
        [2],
        [0, 1, 2],
    ]


def test_a_culprit_does_not_clear_who_failed_alone():
    """
    One failure alone is remembered while another request turns out to be a culprit.
    """
    scheduler = make_scheduler(
        unified=False,
        deterministic=True,
        kind=SnapshotKind.STATE,
        prefill_order="turns",
    )
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=4, max_tokens=9), 0.0)
    step(scheduler)
    step(scheduler)

    ends = [fail(scheduler, scheduler.schedule(0.0))[0] for _ in range(4)]

    assert [[end.request_id for end in found] for found in ends] == [[], [], [0], [1]]


def test_who_left_while_its_step_failed_is_not_suspected():
    """
    A request that was cancelled meanwhile ends as that, and the other goes on.
    """
    scheduler = make_scheduler()
    for request_id in range(2):
        scheduler.add(make_request(request_id), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(0, 0.0)

    [end], _ = fail(scheduler, plan)

    assert end.reason is FinishReason.CANCELLED
    assert shape(scheduler.schedule(0.0)) == [(1, 0, 4, True)]


def test_who_was_not_computed_is_not_suspected():
    """
    A slot that could not be filled had no part in the decode that failed.
    """
    scheduler = make_scheduler()
    for request_id in range(2):
        scheduler.add(make_request(request_id), 0.0)
    lost = frozenset({0})
    fail(scheduler, scheduler.schedule(0.0), not_restored=lost)
    fail(scheduler, scheduler.schedule(0.0), not_restored=lost)

    plan = scheduler.schedule(0.0)

    assert [work.request_id for work in plan.works] == [1]


def test_a_batch_that_is_refused_has_changed_nothing():
    """
    INVALID twice: its sequences are computed alone, from where they are.
    """
    scheduler = make_scheduler()
    for request_id in range(2):
        scheduler.add(make_request(request_id, n_prompt=4), 0.0)
    step(scheduler)
    for _ in range(2):
        fail(scheduler, scheduler.schedule(0.0), INVALID, -1)

    plans = [step(scheduler)[0] for _ in range(2)]

    assert [shape(plan) for plan in plans] == [[(0, 4, 1, True)], [(1, 4, 1, True)]]


def test_who_is_refused_alone_is_computed_from_the_start():
    """
    The slot may hold something else than is believed, so it is emptied once.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, n_prompt=4), 0.0)
    step(scheduler)
    fail(scheduler, scheduler.schedule(0.0), INVALID, -1)

    assert shape(scheduler.schedule(0.0)) == [(0, 0, 5, True)]


def test_output_is_computed_again_as_it_was_at_first():
    """
    Where a chunk gives other last digits: the prompt in a chunk, then one by one, and only
    the last row is sampled.
    """
    scheduler = make_scheduler(
        unified=False, deterministic=True, kind=SnapshotKind.STATE
    )
    scheduler.add(make_request(0, n_prompt=4, max_tokens=9), 0.0)
    for _ in range(3):
        step(scheduler)
    fail(scheduler, scheduler.schedule(0.0))

    plans = [step(scheduler)[0] for _ in range(4)]

    assert [shape(plan) for plan in plans] == [
        [(0, 0, 4, False)],
        [(0, 4, 1, False)],
        [(0, 5, 1, False)],
        [(0, 6, 1, True)],
    ]
    assert [type(w) for p in plans for w in p.works] == [Prefill] * 3 + [Decode]


def test_an_aborted_prompt_is_not_left_with_one_token():
    """
    Also where output follows it that is computed again.
    """
    scheduler = make_scheduler(
        unified=False, deterministic=True, kind=SnapshotKind.STATE
    )
    scheduler.add(make_request(0, n_prompt=8, max_tokens=9), 0.0)
    for _ in range(3):
        step(scheduler)
    fail(scheduler, scheduler.schedule(0.0))
    plan = scheduler.schedule(0.0)

    aborted = StepResult(DecodeStatus.ABORTED, (PartlyComputed(7),))
    scheduler.apply(plan, aborted, 0.0)

    assert shape(scheduler.schedule(0.0)) == [(0, 6, 2, False)]


@pytest.mark.parametrize("kind", list(SnapshotKind))
def test_after_a_failure_snapshots_and_leaders_are_used(kind):
    """
    What host memory has is restored, and equal prompts are computed once, again.
    """
    engine = Engine(4, kind=kind, unified=kind.is_part)
    prompt = list(range(100, 140))
    for _ in range(3):
        engine.add(prompt, 4)
    for _ in range(3):
        engine.step()
    n_before = engine.n_computed
    engine.step(breaks=True)

    engine.run()

    n_again = engine.n_computed - n_before
    assert {end.n_output for end in engine.ends.values()} == {4}
    assert n_again < 2 * len(prompt)


def test_prompts_that_lack_cells_make_room():
    """
    Two that shared cells do not fit when each computes its own: one gives way, and a step
    is never empty.
    """
    engine = Engine(
        2, n_ctx_slot=128, n_cells=200, token_budget=8, prefill_quantum=8, n_batch=8
    )
    prompt = list(range(100, 120))
    for _ in range(2):
        engine.add(prompt, 100)
    while min(len(text) for text in engine.texts.values()) < 108:
        engine.step()
    engine.scheduler.memory.reuses = False  # nothing is shared this time
    engine.step(breaks=True)

    engine.run()

    assert {end.n_output for end in engine.ends.values()} == {100}


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_slots": 0},
        {"n_ctx_slot": 1},
        {"n_ctx_slot": -(2**31)},
        {"n_batch": 1},
        {"n_cells": 0},
        {"n_cells": -1},
        {"n_parked": -1},
        {"n_swa": -1},
        {"n_outputs": 1},
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(wrong):
    """
    No loop of the core is entered with numbers that it could not end with.
    """
    fields = {"n_slots": 2, "n_ctx_slot": 64, "n_batch": 64, "n_cells": 128}

    with pytest.raises(AssertionError):
        ContextLimits(**(fields | wrong))
