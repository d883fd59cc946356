"""Whether a restore pays: learned speeds, and what a sequence then starts from."""

from array import array

import pytest

from pyllama_raw.core.costs import CopySpeed, CostHistory
from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import CacheTier, Request
from pyllama_raw.core.step import Load
from tests.core.support import answer, finished, make_request, make_scheduler

N_BYTES = 1000  # of the snapshot


def make_speeds(tokens_per_s=100.0):
    prefill = CostHistory()
    prefill.observe(round(tokens_per_s), 0, 1.0)
    return prefill, CopySpeed(prefill)


def test_prefill_speed_follows_the_newest_steps():
    """
    The first step counts whole, later ones by a quarter; small steps do not count.
    """
    speed, _ = make_speeds(100)
    speed.observe(200, 0, 1.0)
    speed.observe(1, 0, 1.0)
    speed.observe(100, 0, 0.0)

    assert speed.tokens_per_s == 125


@pytest.mark.parametrize(("n_bytes", "n_worth"), [(5000, 100), (5001, 101)])
def test_a_restore_is_worth_the_tokens_of_its_time(n_bytes, n_worth):
    """
    100 tokens are computed in a second, in which 5,000 bytes are restored.
    """
    _, speed = make_speeds(100)
    speed.observe(5000, 1.0)

    assert speed.n_worth(n_bytes) == n_worth


def test_the_fastest_restore_counts():
    """
    One that met a busy moment does not rule out the next one.
    """
    _, speed = make_speeds(100)
    for seconds in (10.0, 1.0, 10.0, 0.0):
        speed.observe(5000, seconds)

    assert speed.n_worth(5000) == 100


def test_what_was_not_measured_is_tried():
    """
    Neither an unknown prefill nor an unknown tier rules out a restore.
    """
    unknown = CopySpeed(CostHistory())
    unknown.observe(1, 100.0)
    _, unused = make_speeds()

    assert (unknown.n_worth(10**12), unused.n_worth(10**12)) == (0, 0)


def run(scheduler, request, restore_s):
    """Until the scheduler is idle; restores take *restore_s*, steps 1 s."""
    scheduler.add(request, 0.0)
    while plan := scheduler.schedule(1.0):
        loads = [move for move in plan.moves if isinstance(move, Load)]
        took = {load.slot: restore_s for load in loads}
        result = answer(plan)._replace(restore_s=took)
        events = scheduler.apply(plan, result, 2.0)
        scheduler.check_integrity()
    return finished(events)[request.request_id]


def make_with_snapshot():
    """One slot, and a snapshot of 100 tokens."""
    cache = PrefixCache(SnapshotKind.RANGE, max_bytes=10**6, max_entries=9)
    tokens = array("i", range(100, 200))
    reservation = cache.reserve(cache.plan_store(None, tokens, 100), N_BYTES)
    cache.commit(reservation, "snapshot", N_BYTES)
    return make_scheduler(1, 400, 400, cache=cache, unified=True)


def foreign(request_id):
    """A prompt that shares nothing, and takes the slot."""
    return Request(request_id, array("i", range(5000, 5040)), 1)


@pytest.mark.parametrize(("restore_s", "tier"), [(0.1, CacheTier.HOST), (30.0, None)])
def test_prompts_are_computed_where_that_is_faster(restore_s, tier):
    """
    The first restore is a try; the next one knows how long it takes.
    """
    scheduler = make_with_snapshot()

    first = run(scheduler, make_request(0, n_prompt=150, max_tokens=1), restore_s)
    run(scheduler, foreign(1), restore_s)
    second = run(scheduler, make_request(2, n_prompt=150, max_tokens=1), restore_s)

    assert first.cache_tier == CacheTier.HOST
    assert second.cache_tier == tier
