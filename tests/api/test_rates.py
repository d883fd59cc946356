"""Rates and bytes that results and statistics tell, against exact numbers."""

from dataclasses import replace

import pytest

from pyllama_raw import Result
from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.core.request import FinishReason
from pyllama_raw.results import Timings, Usage
from tests.core.support import answer, make_request, make_scheduler

TIMINGS = Timings(
    queue_s=0.0,
    ttft_s=0.025,
    itl_p50_s=0.025,
    itl_p99_s=0.025,
    tpot_s=0.025,
    e2e_s=0.125,
    prefill_s=0.025,
    decode_s=0.1,
)
RESULT = Result(
    text="abcde",
    token_ids=(1, 2, 3, 4, 5),
    finish_reason=FinishReason.LENGTH,
    usage=Usage(prompt_tokens=5, completion_tokens=5, cached_tokens=0),
    timings=TIMINGS,
    seed=0,
)


def test_rates_are_of_what_was_computed():
    """
    Five prompt tokens in 25 ms are 200 a second, four more outputs in 100 ms are 40; what
    was cached does not count, and without a time there is no rate.
    """
    cached = replace(RESULT, usage=replace(RESULT.usage, cached_tokens=4))
    no_times = replace(RESULT, timings=replace(TIMINGS, prefill_s=None, decode_s=None))

    rates = [
        (result.prefill_tokens_per_s, result.decode_tokens_per_s)
        for result in (RESULT, cached, no_times)
    ]
    assert rates == [(200.0, 40.0), (40.0, 40.0), (None, None)]


def test_bytes_of_cells_are_those_of_their_tokens():
    """
    A prompt of eight tokens takes eight cells; the token that is sampled has none yet.
    """
    scheduler = make_scheduler(snapshot_cost=SnapshotCost(0, 10))
    scheduler.add(make_request(n_prompt=8), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, answer(plan), 0.0)

    stats = scheduler.stats()

    assert (stats.n_cells_used, stats.kv_bytes_used) == (8, 80)


@pytest.mark.parametrize(
    "n_requests", [10_000, pytest.param(100_000, marks=pytest.mark.nightly)]
)
def test_a_long_queue_is_bounded_and_empties(n_requests):
    """
    While nothing is computed all of them wait; each then ends once.
    """
    scheduler = make_scheduler()
    for request_id in range(n_requests):
        scheduler.add(make_request(request_id, n_prompt=1, max_tokens=1), 0.0)
    n_waiting = scheduler.stats().waiting
    for request_id in range(n_requests):
        scheduler.cancel(request_id, 0.0)
    ended = [event.request_id for event in scheduler.take_events()]

    assert n_waiting == n_requests
    assert sorted(ended) == list(range(n_requests))
    assert not scheduler.alive
