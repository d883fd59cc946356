"""Captures: their price is known before they are paid, and a step has time for so many."""

import pytest

from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.memory.tier import SnapshotCost
from pyllama_raw.core.speed import Capture, Captures, CopyPrice, PrefillSpeed
from pyllama_raw.core.step import Load, Save, Saved
from tests.core.support import answer, finished, make_request, make_scheduler

# As without flash attention on a device: 28 ms for each run of cells.
SLOW = CopyPrice(base_s=0.028, run_s=0.028, restore_s=0.028)
# As with it.
FLASH = CopyPrice(base_s=0.0005, run_s=0.0004, restore_s=0.0005)
TARGET_S = 0.1


def make_captures(price, tokens_per_s=30_000.0):
    prefill = PrefillSpeed()
    prefill.observe(round(tokens_per_s), 1.0)
    captures = Captures(price, prefill, TARGET_S)
    captures.begin(others_wait=True)
    return captures


@pytest.mark.parametrize("others_wait", [True, False])
def test_what_is_dearer_than_computing_is_not_captured(others_wait):
    """
    128 tokens of a prompt are computed in 4 ms, and captured in 56.
    """
    captures = make_captures(SLOW)
    captures.begin(others_wait=others_wait)

    assert captures.plan(0, 128, 128, in_parts=True) is None
    assert captures.plan(0, 192, 128, in_parts=False) is None


def test_a_long_prompt_pays_where_nobody_waits():
    """
    64,000 tokens take 2.1 s to compute, and 28 s to capture; at 1,000 a second they pay.
    """
    fast, slow = make_captures(SLOW), make_captures(SLOW, 1000)
    for captures in (fast, slow):
        captures.begin(others_wait=False)

    assert fast.plan(0, 64_000, 64_000, in_parts=True) is None
    assert slow.plan(0, 64_000, 64_000, in_parts=True).stop == 64_000


def test_outputs_that_lie_apart_are_left_out():
    """
    The prompt is two runs of cells, each token of the output one of its own.
    """
    captures = make_captures(FLASH)
    captures.begin(others_wait=False)

    capture = captures.plan(0, 512, 128, in_parts=True)

    assert capture == Capture(128, 2, pytest.approx(0.0005 + 128 * 0.0004))


def test_captures_of_a_step_take_half_of_it_and_end_in_parts():
    """
    Until it is known how cells lie, each may lie alone; what does not fit is left out.
    """
    captures = make_captures(FLASH)
    stops = []
    for _ in range(3):
        capture = captures.plan(0, 100, 100, in_parts=True)
        stops.append(capture and capture.stop)
        if capture:
            captures.spend(capture)

    assert stops == [100, 22, None]
    assert captures.spent_s <= TARGET_S / 2


def test_decodes_come_first():
    """
    Beside decodes of 90 ms a step of 100 has 10 ms for captures, and never less than a tenth.
    """
    captures = make_captures(FLASH)
    found = []
    for decode_s in (0.0, 0.09, 0.2):
        for _ in range(50):
            captures.observe_decode(decode_s)
        captures.begin(others_wait=True)
        capture = captures.plan(0, 1000, 1000, in_parts=True)
        found.append(capture.stop)

    assert found == [123, 23, 48]


def test_prices_follow_what_captures_take():
    """
    Where cells lie side by side more and more fits; one slow capture, and it is as at first.
    """
    captures = make_captures(FLASH)
    stops = []
    for n_tokens, seconds in ((100, 0.001),) * 8 + ((100, 10.0),):
        captures.begin(others_wait=True)
        stops.append(captures.plan(0, 4000, 4000, in_parts=True).stop)
        captures.observe(n_tokens, 2, seconds)
    captures.begin(others_wait=True)
    last = captures.plan(0, 4000, 4000, in_parts=True)

    assert stops == sorted(stops)
    assert stops[-1] > 4 * stops[0]
    assert last is None or last.stop == stops[0]


@pytest.mark.parametrize("in_parts", [True, False])
def test_what_costs_nothing_is_always_captured(in_parts):
    """
    Without prices, as in a context that was not measured, all is captured.
    """
    captures = make_captures(CopyPrice())

    assert captures.plan(3, 9000, 9000, in_parts=in_parts).stop == 9000


def run(scheduler, requests, capture_s):
    """Seconds of the longest step, and what was captured: a token is computed in 0.1 ms."""
    now, longest, n_saved = 0.0, 0.0, 0
    for request in requests:
        scheduler.add(request, now)
    while plan := scheduler.schedule(now):
        saves = [move for move in plan.moves if isinstance(move, Save)]
        took = {s.save_id: capture_s(s.stop - s.start) for s in saves}
        moves_s = sum(took.values())
        n_saved += sum(s.stop - s.start for s in saves)
        seconds = 0.0001 * plan.n_tokens + 0.001 + moves_s
        result = answer(plan)._replace(moves_s=moves_s)
        saved = {s.save_id: Saved("state", 100, took[s.save_id]) for s in saves}
        now += seconds
        scheduler.apply(plan, result._replace(saved=saved), now)
        scheduler.check_integrity()
        longest = max(longest, seconds if saves else 0.0)
    return longest, n_saved


@pytest.mark.parametrize("kind", [SnapshotKind.RANGE, SnapshotKind.EXACT])
@pytest.mark.parametrize("cell_s", [0.00001, 0.0001, 0.001])
def test_no_step_is_long_by_a_capture(kind, cell_s):
    """
    Where a copied cell costs so much, a step with captures stays within its target.
    """
    price = CopyPrice(base_s=2 * cell_s, token_s=cell_s, restore_s=2 * cell_s)
    cache = PrefixCache(kind, max_bytes=10**9, max_entries=99)
    scheduler = make_scheduler(
        8,
        2048,
        16384,
        cache=cache,
        unified=True,
        kind=kind,
        token_budget=None,
        target_step_s=TARGET_S,
        snapshot_cost=SnapshotCost(100, 1, price),
    )
    requests = [
        make_request(i, n_prompt=150 + 10 * i, max_tokens=40) for i in range(32)
    ]

    longest, n_saved = run(scheduler, requests, lambda n: cell_s * n)

    assert longest <= TARGET_S * 1.1
    assert n_saved > 0 or cell_s > 0.00005


def test_a_restore_that_is_dearer_than_computing_is_not_taken():
    """
    A small restore took as long as 840 tokens at the first opening already.
    """
    cache = PrefixCache(SnapshotKind.RANGE, max_bytes=10**6, max_entries=9)
    request = make_request(0, n_prompt=150, max_tokens=1)
    tokens = request.tokens[:100]
    cache.commit(
        cache.reserve(cache.plan_store(None, tokens, 100), 100), "snapshot", 100
    )
    scheduler = make_scheduler(
        1, 400, 400, cache=cache, unified=True, snapshot_cost=SnapshotCost(0, 1, SLOW)
    )
    scheduler._speed.observe(30_000, 1.0)
    scheduler.add(request, 0.0)
    events = []
    while plan := scheduler.schedule(1.0):
        assert not any(isinstance(move, Load) for move in plan.moves)
        events += scheduler.apply(plan, answer(plan), 1.0)

    assert finished(events)[0].n_cached == 0
