"""Texts that become vectors beside sequences that generate, in one scheduler."""

import os

import numpy as np
import pytest

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.request import Embedded, FinishReason
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import DecodeStatus, RowFailed, StepPlan, StepResult
from pyllama_raw.engine.requests import Admission
from pyllama_raw.errors import DecodeFailed, EmbeddingFailed
from pyllama_raw.policy import SchedulingPolicy
from pyllama_raw.testing import FakeExecutor
from tests.core import embedding_support as texts
from tests.core.support import Pieces, make_request

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "10"))
LIMITS = ContextLimits(n_slots=2, n_ctx_slot=40, n_batch=20, n_cells=60)
TEXT_LIMITS = ContextLimits(n_slots=4, n_ctx_slot=100, n_batch=40, n_cells=140)


class House:
    """A scheduler with a context that generates, and one that makes vectors."""

    def __init__(self, **options) -> None:
        self.scheduler = Scheduler(
            LIMITS, Pieces(), texts=TEXT_LIMITS, token_budget=texts.BUDGET, **options
        )
        self.executor = FakeExecutor(LIMITS)
        self.events = []

    def add(self, *requests) -> None:
        for request in requests:
            if not request.lot.makes_vectors:
                self.executor.open(request)
        self.scheduler.add_all(requests, 0.0)

    def step(self, change=lambda plan, result: result) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        if plan:
            self.take(plan, change)
        self.events += self.scheduler.take_events()
        self.scheduler.check_integrity()
        return plan

    def take(self, plan: StepPlan, change) -> None:
        makes_vectors = plan.lot.makes_vectors
        run = texts.compute if makes_vectors else self.executor.execute
        result = run(plan)
        if makes_vectors:
            result = change(plan, result)
        self.events += self.scheduler.apply(plan, result, 1.0)

    def run(self, change=lambda plan, result: result) -> list[StepPlan]:
        plans = []
        while plan := self.step(change):
            plans.append(plan)
        return plans


def test_texts_and_sequences_take_turns():
    """
    A step of one follows a step of the other; what is left goes on alone.
    """
    house = House()
    house.add(make_request(0, max_tokens=5), texts.make_request(1, [9, 9, 9]))

    plans = house.run()

    kinds = [plan.lot.makes_vectors for plan in plans if plan.works]
    assert kinds == [False, True, False, True, False, True, False, False]
    assert texts.ends_of(house.events) == {
        0: FinishReason.LENGTH,
        1: FinishReason.STOP,
    }


def test_texts_wait_for_no_slot():
    """
    With all slots taken and a queue, a request for vectors runs with the second step.
    """
    house = House()
    house.add(*(make_request(i, max_tokens=20) for i in range(4)))
    house.step()
    house.add(texts.make_request(9, [3, 8]))
    before = house.scheduler.stats()

    plans = [house.step(), house.step()]
    during = house.scheduler.occupancy

    assert (before.running, before.waiting) == (2, 3)
    assert before.waiting_tokens == 4 + 4 + 11
    assert [len(plan.works) for plan in plans] == [2, 1]
    assert (during.n_running, during.n_waiting) == (3, 2)


def test_a_step_of_texts_leaves_the_moves_of_slots_to_the_next_one():
    """
    A slot that is left while texts are computed is emptied with the next step.
    """
    house = House()
    house.add(make_request(0, max_tokens=30), texts.make_request(1, [9, 9, 9]))
    house.step()
    plan = house.scheduler.schedule(0.0)
    house.scheduler.cancel(0, 0.0)

    house.take(plan, lambda _, result: result)
    after = house.scheduler.schedule(0.0)

    assert (plan.lot.makes_vectors, plan.moves) == (True, ())
    assert (len(after.moves), after.works) == (1, ())


@pytest.mark.parametrize("status", [DecodeStatus.FAILED, DecodeStatus.INVALID])
def test_a_step_of_texts_that_fails_loses_no_sequence(status):
    """
    The other context has what it had: no token is computed again.
    """
    house = House()
    house.add(make_request(0, max_tokens=5), texts.make_request(1, [9]))
    error = DecodeFailed("llama_decode", -3, "no")

    plans = house.run(lambda _, result: StepResult(status, error=error))

    steps = [p for p in plans if p.works and not p.lot.makes_vectors]
    computed = [plan.n_tokens for plan in steps]
    assert computed == [4, 1, 1, 1, 1]
    assert texts.ends_of(house.events) == {0: FinishReason.LENGTH, 1: error}


@pytest.mark.parametrize("status", [DecodeStatus.INVALID, DecodeStatus.FAILED])
def test_a_text_that_fails_once_is_computed_again(status):
    """
    Most failures are of the moment, also where a text is alone in its step.
    """
    house = House()
    house.add(texts.make_request(1, [9]))
    results = iter([StepResult(status, error=DecodeFailed("llama_decode", -3, "no"))])

    house.run(lambda _, result: next(results, result))

    assert texts.ends_of(house.events) == {1: FinishReason.STOP}


def test_a_text_in_parts_whose_last_step_always_fails_ends():
    """
    Steps of its first part do not clear it.
    """
    house = House()
    error = DecodeFailed("llama_decode", -3, "no")
    house.add(texts.make_request(1, [15], may_cut=True, lot=texts.LAST))

    def fail(plan, result):
        is_last = plan.works[0].is_last
        return StepResult(DecodeStatus.FAILED, error=error) if is_last else result

    house.run(fail)

    assert texts.ends_of(house.events) == {1: error}


def test_a_text_in_parts_may_fail_with_its_last_one():
    """
    The parts of it are forgotten, and others go on.
    """
    house = House()
    lot, error = texts.LAST, EmbeddingFailed()
    house.add(
        texts.make_request(1, [15], may_cut=True, lot=lot),
        texts.make_request(2, [3], lot=lot),
    )

    def fail(plan, result):
        first, *others = result.outputs
        is_first = plan.works[0].request_id == 1 and plan.works[0].is_last
        return StepResult(outputs=(RowFailed(error) if is_first else first, *others))

    house.run(fail)

    assert texts.ends_of(house.events) == {1: error, 2: FinishReason.STOP}


class Listening(SchedulingPolicy):
    """Notes the requests that it is told of."""

    name = "listening"

    def __init__(self) -> None:
        self.told = set()

    def on_arrival(self, request, now) -> None:
        self.told.add(request.request_id)

    on_admitted = on_finished = on_arrival


def test_a_policy_decides_on_slots_only():
    """
    It is told nothing of requests that take none.
    """
    policy = Listening()
    house = House(policy=policy)
    house.add(make_request(0), texts.make_request(1, [9]))

    house.run()

    assert policy.told == {0}
    assert house.scheduler.stats().policy_faults == 0


def test_texts_count_as_requests_and_not_in_tokens():
    """
    A long list of texts is taken in while prompts wait, as long as there is a place.
    """
    admission = Admission(1, max_waiting=1, max_waiting_tokens=10)
    admission.enter([make_request(0, n_prompt=50)])

    (ticket,) = admission.enter([texts.make_request(1, [40] * 100)])

    assert (ticket.n_tokens, admission.n_open) == (0, 2)


def random_request(rng, request_id: int):
    """One that generates, or one with texts."""
    if rng.random() < 0.5:
        return make_request(request_id, max_tokens=int(rng.integers(1, 9)))
    sizes = rng.integers(1, 31, rng.integers(1, 7)).tolist()
    lot = texts.LAST if rng.random() < 0.4 else texts.MEAN
    may_cut = lot is texts.LAST
    return texts.make_request(request_id, sizes, may_cut=may_cut, lot=lot)


@pytest.mark.unwatched
@pytest.mark.chance
@pytest.mark.parametrize("seed", range(N_CASES))
def test_random_histories_beside_sequences_keep_the_rules(seed):
    """
    Every request ends once, with all its vectors if nothing has stopped it.
    """
    rng, house = np.random.default_rng(seed), House()
    requests = [random_request(rng, request_id) for request_id in range(30)]

    def change(_, result):
        if rng.random() < 0.1:
            return StepResult(DecodeStatus.ABORTED)
        if rng.random() < 0.1:
            return StepResult(DecodeStatus.FAILED, error=texts.ERROR)
        return result

    for request in requests:
        house.add(request)
        if rng.random() < 0.2:
            house.scheduler.cancel(int(rng.integers(30)), 0.0)
        house.step(change)
    house.run()

    stats, ends = house.scheduler.stats(), texts.ends_of(house.events)
    assert ends.keys() == set(range(30))
    assert (stats.submitted, stats.running, stats.waiting) == (30, 0, 0)
    for request in requests:
        vectors = [e for e in house.events if isinstance(e, Embedded)]
        given = [e.index for e in vectors if e.request_id == request.request_id]
        assert given == list(range(len(given)))
        if request.lot.makes_vectors and ends[request.request_id] is FinishReason.STOP:
            assert len(given) == len(request.ends)
