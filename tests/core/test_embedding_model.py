"""Random histories of embedding requests keep the rules."""

import os

import numpy as np
import pytest

from pyllama_raw.core.request import Embedded, EmbedRequest, FinishReason
from pyllama_raw.core.step import (
    DecodeStatus,
    StepPlan,
    StepResult,
)
from tests.core.embedding_support import (
    BUDGET,
    ERROR,
    LAST,
    MEAN,
    compute,
    ends_of,
    make_request,
    make_scheduler,
)

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "40"))


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
