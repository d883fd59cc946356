"""Snapshots: what is captured when, restored when, and who may see it."""

from array import array

import pytest

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import CacheTier, FinishReason, Request
from pyllama_raw.core.stats import Eviction, Refusal
from pyllama_raw.core.step import (
    Load,
    Release,
    Save,
)
from pyllama_raw.testing.executor import FakeMemory
from tests.core.reuse_support import ANSWER, A, B, Engine
from tests.core.support import answer, make_scheduler

KINDS = pytest.mark.parametrize("kind", SnapshotKind)
CUTTABLE = pytest.mark.parametrize("kind", [SnapshotKind.RANGE, SnapshotKind.STATE])


# -- host snapshots ------------------------------------------------------------------


@CUTTABLE
def test_who_loses_the_slot_is_captured_and_restored(kind):
    """
    The place goes to another request; the next turn comes back from host memory.
    """
    engine = Engine(1, kind=kind)
    engine.run(A)
    engine.run(B)

    [end] = engine.run([*A, ANSWER, 5, 6])

    assert (end.n_cached, end.cache_tier) == (len(A) + 1, CacheTier.HOST)
    assert len(engine.of(Load)) == 1
    assert engine.cache.n_hit_tokens_host == len(A) + 1


def test_ranges_are_captured_once_and_restored_as_a_chain():
    """
    A longer turn captures what is new only; both pieces come back in order.
    """
    engine = Engine(1)
    engine.run(A)
    engine.run(B)
    engine.run([*A, ANSWER, 5])
    engine.run([7, *B])

    [end] = engine.run([*A, ANSWER, 5, ANSWER, 6, 7])

    assert end.n_cached == len(A) + 3
    assert [(c.start, c.stop) for c in engine.of(Save)][2] == (41, 43)
    assert [(p.start, p.stop) for p in engine.of(Load)[-1].pieces] == [
        (0, 41),
        (41, 43),
    ]


@KINDS
def test_a_restore_that_fails_is_a_miss(kind):
    """
    The request computes its prompt; what could not be restored is forgotten.
    """
    engine = Engine(1, kind=kind)
    engine.run(A)
    engine.run(B)
    engine.fails = (Load,)

    [end] = engine.run([*A, ANSWER, 5, 6])

    n_known = 2 if kind is SnapshotKind.EXACT else 1  # each is tried once
    assert len(engine.of(Load)) == n_known
    assert (end.reason, end.n_cached, end.cache_tier) == (FinishReason.LENGTH, 0, None)
    assert engine.cache.n_evictions[Eviction.DROPPED] >= 1


@KINDS
def test_a_capture_that_fails_is_a_miss(kind):
    """
    Its room in the cache is given back.
    """
    engine = Engine(1, kind=kind, fails=(Save,))
    engine.run(A)
    engine.run(B)

    [end] = engine.run([*A, ANSWER, 5])

    assert (end.reason, end.n_cached) == (FinishReason.LENGTH, 0)
    assert engine.cache.n_refusals[Refusal.ABANDONED] >= 2
    assert (engine.cache.n_bytes, engine.cache.n_reserved_bytes) == (0, 0)


def test_a_copy_of_what_was_not_restored_is_lost_too():
    """
    One request computes its prompt, and the other may take that over.
    """
    engine = Engine(2, token_budget=64)
    engine.run(A)
    engine.run(B, [300, *B])
    engine.fails = (Load,)

    ends = engine.run([*A, ANSWER, 5], [*A, ANSWER, 6])

    assert engine.of(Load)
    assert min(end.n_cached for end in ends) == 0
    assert {end.reason for end in ends} == {FinishReason.LENGTH}


def test_a_slot_that_was_not_restored_and_lost_its_request_is_empty():
    """
    The request ended while the step ran: nobody finds its tokens in the slot.
    """
    engine = Engine(1)
    engine.run(A)
    engine.run(B)
    engine.fails = (Load,)
    request_id = engine.add([*A, ANSWER, 5])
    engine.step(lambda: engine.scheduler.cancel(request_id, 0.0))

    engine.fails = ()
    [end] = engine.run([*A, ANSWER, 5])

    assert end.n_cached == 0


def test_a_snapshot_that_finds_no_cells_is_a_miss():
    """
    Running slots hold the cells it would need before its end can be cut off.
    """
    engine = Engine(2, n_cells=76, n_ctx_slot=64)
    engine.run([*A, *range(300, 318)])
    engine.run(B)
    engine.add(B[:20], 14)
    engine.step()

    [end] = engine.run([*A[:18], 5], max_tokens=1)

    assert engine.of(Load) == []
    assert (end.reason, end.n_cached) == (FinishReason.LENGTH, 0)


def test_limits_hold_after_every_step():
    """
    What does not fit is evicted or refused, oldest first.
    """
    engine = Engine(1, max_bytes=1200, max_entries=2)
    for n in range(8):
        engine.add([n + 300, *A[: 5 * n + 1]])
        while engine.step():
            assert engine.cache.n_bytes + engine.cache.n_reserved_bytes <= 1200
            assert engine.cache.n_entries + engine.cache.n_reserved <= 2

    assert engine.cache.n_evictions[Eviction.SPACE] > 0


def test_nothing_is_kept_without_a_cache():
    """
    Cache off: a slot is emptied as its request ends.
    """
    scheduler = make_scheduler(1)
    memory = FakeMemory(scheduler.limits)
    for request_id in range(2):
        scheduler.add(Request(request_id, array("i", A), 1), 0.0)
        plan = scheduler.schedule(0.0)
        memory.run(plan.moves)
        for work in plan.works:
            memory.write(work.slot, work.tokens)
        [_, end] = scheduler.apply(plan, answer(plan, ANSWER), 0.0)
        assert end.n_cached == 0

    assert scheduler.schedule(0.0).moves == (Release(0),)
    assert scheduler.cache_stats().n_queries == 0


# -- isolation, clearing -----------------------------------------------------------


@KINDS
def test_different_salts_share_nothing(kind):
    """
    Neither a running or idle slot, nor a snapshot; nobody waits for another one's
    prompt, which would show in the time.
    """
    engine = Engine(2, kind=kind)

    at_once = [engine.add(A, namespace=salt) for salt in ("x", "y")]
    plan = engine.step()
    assert len(plan.works) == 2
    engine.run()
    engine.run([*B, 1], [*B, 2])
    [later] = engine.run([*A, ANSWER, 5], namespace="z")

    assert [engine.ends[i].n_cached for i in at_once] == [0, 0]
    assert later.n_cached == 0
    [same] = engine.run([*A, ANSWER, 5], namespace="x")
    assert same.n_cached > 0


def test_clearing_empties_idle_slots_and_host_memory():
    """
    Afterwards nothing is found, and the host bytes are free.
    """
    engine = Engine(2)
    engine.run(A)
    engine.run(B)
    engine.run(list(range(300, 330)))
    n_bytes = engine.cache.n_bytes

    assert n_bytes > 0
    assert engine.scheduler.clear_cache() == n_bytes
    assert engine.cache.n_bytes == 0
    ends = engine.run([*A, 5], [*B, 5])
    assert [end.n_cached for end in ends] == [0, 0]


def test_clearing_a_namespace_leaves_the_others():
    """
    Slots and snapshots of other salts stay.
    """
    engine = Engine(2)
    engine.run(A, namespace="x")
    engine.run(B, namespace="y")

    engine.scheduler.clear_cache("x")

    assert engine.run([*B, 5, 6], namespace="y")[0].n_cached == len(B)
    assert engine.run([*A, 5], namespace="x")[0].n_cached == 0


# -- memory that cannot be cut -------------------------------------------------------


def test_prefill_stops_at_each_point_and_captures_there():
    """
    Regular points, those the caller marked, and two tokens before the end.
    """
    engine = Engine(1, kind=SnapshotKind.EXACT, interval=16)

    engine.run(A, cache_points=(20,))
    engine.run(B[:1])

    works = [work for plan in engine.plans for work in plan.works]
    assert [work.pos for work in works[:6]] == [0, 16, 20, 32, 38, 40]
    assert [c.stop for c in engine.of(Save)] == [16, 20, 32, 38, 41]


def test_where_prompts_part_is_captured():
    """
    The second prompt that shares a beginning is captured where it parts from the first.
    """
    engine = Engine(1, kind=SnapshotKind.EXACT)
    engine.run(A)
    engine.run([*A[:25], *B[:20]])

    [end] = engine.run([*A[:25], 5, 6])

    assert 25 in [capture.stop for capture in engine.of(Save)]
    assert (end.n_cached, end.cache_tier) == (25, CacheTier.HOST)


def test_points_are_not_captured_when_nothing_is_stored():
    """
    Mode "live": prefill does not stop for snapshots.
    """
    engine = Engine(1, kind=SnapshotKind.EXACT, interval=16, max_bytes=0)

    engine.run(A)

    assert engine.of(Save) == []
    assert len(engine.plans[0].works[0].tokens) == len(A)


def test_points_behind_what_was_restored_are_dropped():
    """
    Somebody waits for a point of a sequence that then comes back from further on.
    """
    engine = Engine(1, kind=SnapshotKind.EXACT)
    request_id = engine.add(A)
    engine.step()
    running = engine.scheduler.memory.slots.running[request_id]
    running.points[:] = [10, 12, running.n_computed]

    engine.run()

    assert engine.ends[request_id].reason is FinishReason.LENGTH
    assert [c.stop for c in engine.of(Save)] == [38]


# -- where outputs must not depend on what ran before ----------------------------------


def test_memory_with_an_answer_is_not_taken_over():
    """
    What was computed token by token cannot be cut off, so the next turn starts from the
    last point of the prompt, and no chunk of it is a single token.
    """
    engine = Engine(1, kind=SnapshotKind.EXACT, deterministic=True)
    engine.run(A)

    [end] = engine.run([*A, ANSWER, 5], cache_points=(41,))

    assert (end.n_cached, end.cache_tier) == (len(A) - 2, CacheTier.HOST)
    assert [capture.stop for capture in engine.of(Save)] == [38, 40]


@pytest.mark.parametrize(("n_swa", "n_cached"), [(0, 38), (8, 8), (40, 38)])
def test_a_window_is_copied_where_it_keeps_its_place(n_swa, n_cached):
    """
    Points move to where a restored window lies as in a cold run: ALIGN cells further on.
    """
    engine = Engine(1, kind=SnapshotKind.EXACT, deterministic=True, n_swa=n_swa)
    engine.run(A)
    engine.run(B)

    [end] = engine.run(A)

    assert end.n_cached == n_cached


@pytest.mark.parametrize("n_swa", [0, 8])
def test_a_leader_is_left_no_single_token(n_swa):
    """
    Nor does who waits for it take more than it can stop at.
    """
    engine = Engine(
        2, kind=SnapshotKind.EXACT, deterministic=True, max_bytes=0, n_swa=n_swa
    )
    [_, end] = engine.run(A, [*A[:39], 7, 8, 9])

    works = [work for plan in engine.plans for work in plan.works]
    assert end.n_cached == (0 if n_swa else 38)  # 8 tokens are not worth the wait
    assert all(len(work.tokens) > 1 for work in works if work.pos < 40)
