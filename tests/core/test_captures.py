"""Captures: their price is known before they are paid, and a step has time for so many."""

import pytest

from pyllama_raw.core.costs import (
    MIN_PART,
    SHARE,
    SLACK,
    Captures,
    CopyPrice,
    CostHistory,
)
from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.core.step import Load, Save, Saved
from tests.core.support import answer, finished, make_request, make_scheduler

# As without flash attention on a device: 28 ms for each run of cells.
SLOW = CopyPrice(base_s=0.028, run_s=0.028, restore_s=0.028)
# As with it.
FLASH = CopyPrice(base_s=0.0005, run_s=0.0004, restore_s=0.0005)
TARGET_S = 0.1


def make_captures(price, tokens_per_s=30_000.0):
    prefill = CostHistory()
    prefill.observe(round(tokens_per_s), 0, 1.0)
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

    assert (capture.stop, capture.n_runs) == (128, 2)
    assert capture.bound_s >= 0.0005 + 128 * 0.0004


def capture_all(captures, n_tokens, seconds):
    """Capture slots of *n_tokens* as long as a step makes captures; the tokens of each."""
    sizes = []
    while capture := captures.plan(0, n_tokens, n_tokens, in_parts=True):
        captures.spend(capture, capture.stop)
        sizes.append((capture.stop, capture.n_runs))
    for size, n_runs in sizes:
        captures.observe(size, n_runs, seconds(size))
    return [size for size, _ in sizes]


def test_captures_of_a_step_take_half_of_it_and_end_in_parts():
    """
    Until it is known how cells lie, each may lie alone; what does not fit is left out.
    """
    captures = make_captures(FLASH)
    captures.observe(64, 64, 0.0005 + 62 * 0.0004)
    captures.begin(others_wait=True)

    sizes = capture_all(captures, 80, lambda n: 0.0004 * n)

    assert sizes == [80, 42]
    assert captures.spent_s <= TARGET_S / 2


def test_decodes_come_first():
    """
    Beside decodes of 90 ms a step of 100 has 10 ms for captures, and never less than a tenth.
    """
    captures = make_captures(FLASH)
    captures.observe(64, 64, 0.0005 + 62 * 0.0004)
    sizes = []
    for decode_s in (0.0, 0.09, 0.2):
        for _ in range(50):
            captures.observe_decode(decode_s)
        captures.begin(others_wait=True)
        capture = captures.plan(0, 1000, 1000, in_parts=True)
        sizes.append(capture.stop)

    assert sizes == [123, 23, 48]


def test_prices_follow_what_captures_take():
    """
    Where cells lie side by side more and more fits; one slow capture, and little does.
    """
    captures = make_captures(FLASH)
    steps = []
    for seconds in (0.00001,) * 8 + (0.01,) * 2:
        captures.begin(others_wait=True)
        steps.append(sum(capture_all(captures, 4000, lambda n, s=seconds: s * n)))

    assert steps[:3] == [16, 64, 256]
    assert max(steps) > 2000
    assert steps[-1] < MIN_PART


@pytest.mark.parametrize("cell_s", [0.00001, 0.0001, 0.001, 0.003])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 1.0])
@pytest.mark.parametrize("base_s", [0.0, 0.000001, 0.01])
def test_no_step_is_long_whatever_the_first_price_was(cell_s, share, base_s):
    """
    The first captures are small, and the larger ones are as dear as the smaller ones were.
    """
    price = CopyPrice(base_s=base_s, token_s=share * cell_s)
    captures = make_captures(price, tokens_per_s=100.0)
    longest_s = 0.0
    for n_step in range(200):
        captures.begin(others_wait=True)
        sizes = capture_all(captures, 400 + n_step % 7, lambda n: cell_s * n)
        longest_s = max(longest_s, cell_s * sum(sizes))

    assert longest_s <= TARGET_S * (SHARE + SLACK)


@pytest.mark.parametrize("others_wait", [True, False])
@pytest.mark.parametrize(
    "price",
    [
        CopyPrice(base_s=0.00003, token_s=0.02),
        CopyPrice(base_s=0.00003, run_s=0.02),
        CopyPrice(base_s=0.02, run_s=0.02, token_s=0.02),
        CopyPrice(base_s=0.00003, run_s=9.0, token_s=9.0),
    ],
)
def test_a_busy_moment_does_not_end_captures(price, others_wait):
    """
    Measured while others took the CPU, a copy looks thousands of times as dear as it is; so does a
    later one, once. Soon all is captured again.
    """
    captures = make_captures(price)
    sizes = []
    for n_round in range(3):
        if n_round:
            captures.observe(400, 7, 4.0)
        for _ in range(100):
            captures.begin(others_wait=others_wait)
            captures.observe_decode(0.01)
            size = 0
            if capture := captures.plan(0, 400, 400, in_parts=True):
                captures.spend(capture, capture.stop)
                size = capture.stop
                captures.observe(size, capture.n_runs, 0.00002 + 0.000001 * size)
        sizes.append(size)

    assert sizes == [400, 400, 400]


@pytest.mark.parametrize("others_wait", [True, False])
def test_whole_states_are_captured_again_after_a_busy_moment(others_wait):
    """
    A state that is of use as a whole has no beginning to try, so its price is doubted in time.
    """
    captures = make_captures(CopyPrice(base_s=0.01, token_s=0.00001), 1000.0)
    sizes = []
    for n_round in range(2):
        if n_round:
            captures.observe(400, 7, 0.4)
        for _ in range(300):
            captures.begin(others_wait=others_wait)
            size = 0
            if capture := captures.plan(0, 400, 400, in_parts=False):
                captures.spend(capture, 400)
                size = 400
                captures.observe(size, capture.n_runs, 0.01 + 0.000001 * size)
        sizes.append(size)

    assert sizes == [400, 400]


def test_a_dear_capture_is_never_tried_where_others_wait():
    """
    One token takes longer than captures may, and the small copies have shown that.
    """
    captures = make_captures(CopyPrice(base_s=0.2, run_s=0.1, restore_s=0.2))
    n_captures = 0
    for _ in range(1000):
        captures.begin(others_wait=True)
        n_captures += captures.plan(0, 400, 400, in_parts=True) is not None

    assert n_captures == 0


@pytest.mark.parametrize("in_parts", [True, False])
def test_what_was_not_measured_is_captured(in_parts):
    """
    Without a price all pays, until a capture tells one.
    """
    captures = make_captures(None)

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
    scheduler._costs.observe(30_000, 0, 1.0)
    scheduler.add(request, 0.0)
    events = []
    while plan := scheduler.schedule(1.0):
        assert not any(isinstance(move, Load) for move in plan.moves)
        events += scheduler.apply(plan, answer(plan), 1.0)

    assert finished(events)[0].n_cached == 0
