"""What is taken, and counted, where the best prefix cannot be had or cut."""

import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import Tier
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.step import Load, Trim
from pyllama_raw.testing.executor import HEAD_BYTES, TOKEN_BYTES
from tests.core.reuse_support import ANSWER, A, B, Engine

LONG = [*A, *range(300, 318)]
CUTTABLE = pytest.mark.parametrize("kind", [SnapshotKind.RANGE, SnapshotKind.STATE])


def play_fork(n_cells, fails=()):
    """
    A prompt shares 20 tokens with a running one and 30 with LONG, which is in host memory;
    returns its end, the engine, and the tokens that it had from live and host.
    """
    engine = Engine(3, n_cells=n_cells, n_ctx_slot=64)
    engine.run(LONG)
    engine.scheduler.memory.reclaim(n_cells)
    engine.add([*A[:20], *range(400, 420)], 14)
    engine.step()
    engine.step()
    engine.fails = fails
    before = engine.cache
    [end] = engine.run([*A[:30], 5, 6], max_tokens=1)
    n_live = engine.cache.n_hit_tokens_live - before.n_hit_tokens_live
    n_host = engine.cache.n_hit_tokens_host - before.n_hit_tokens_host
    return end, engine, (n_live, n_host)


def test_a_longer_snapshot_is_taken_if_there_are_cells():
    """
    It has ten tokens more than the slot of the running request.
    """
    end, _, _ = play_fork(n_cells=192)

    assert (end.n_cached, end.cache_tier) == (30, CacheTier.HOST)


def test_a_snapshot_that_finds_no_cells_leaves_the_live_prefix():
    """
    Its whole piece does not fit beside who runs: the shorter prefix is copied and counted.
    """
    end, _, counted = play_fork(n_cells=90)

    assert (end.n_cached, end.cache_tier) == (20, CacheTier.LIVE)
    assert counted == (20, 0)


def test_a_snapshot_that_cannot_be_restored_leaves_the_live_prefix():
    """
    The next best is taken in the step after, and a failed restore is no hit.
    """
    end, engine, counted = play_fork(n_cells=192, fails=(Load,))

    assert len(engine.of(Load)) == 1
    assert (end.n_cached, end.cache_tier) == (20, CacheTier.LIVE)
    assert counted == (20, 0)


def test_the_last_idle_slot_is_not_given_up_for_what_cannot_be_had():
    """
    A slot that holds a shorter prefix is gone on in if a file finds no cells.
    """
    engine = Engine(2, n_cells=76, n_ctx_slot=64)
    engine.run(LONG)
    engine.scheduler.memory.reclaim(76)
    engine.add(B[:20], 14)
    engine.step()
    engine.run(A[:10], max_tokens=1)

    [end] = engine.run([*A[:18], 5], max_tokens=1)

    assert engine.of(Load) == []
    assert (end.n_cached, end.cache_tier) == (10, CacheTier.LIVE)


@CUTTABLE
def test_a_refused_cut_is_computed_again_and_not_tried_again(kind):
    """
    The slot is empty then. From now on slots are of use as a whole, and nothing is copied.
    """
    engine = Engine(1, kind=kind, fails=(Trim,))
    engine.run(A)

    [cut] = engine.run([*A[:20], 5])
    [cut_again] = engine.run([*A[:10], 5])
    [whole] = engine.run([*A[:10], 5, ANSWER, 6, 7])

    assert [end.n_output for end in (cut, cut_again, whole)] == [2, 2, 2]
    assert [end.n_cached for end in (cut, cut_again, whole)] == [0, 0, 12]
    assert len(engine.of(Trim)) == 1
    assert engine.of(Load) == []
    assert engine.cache.n_entries == 0


def test_memory_that_refuses_cuts_is_not_shifted_either():
    """
    A full slot is computed again without the older half.
    """
    engine = Engine(
        1, kind=SnapshotKind.RANGE, fails=(Trim,), n_ctx_slot=48, context_full="shift"
    )
    engine.run(A)
    engine.run([*A[:20], 5])

    [end] = engine.run(B, max_tokens=30)

    assert end.n_output == 30
    assert engine.scheduler.stats().shifted == 0


@pytest.mark.parametrize(("fails", "n_plans"), [((), 1), ((Trim,), 0)])
def test_nothing_is_written_to_files_that_would_have_to_be_cut(fails, n_plans):
    """
    Not even what idle slots hold at the end, which is written otherwise.
    """
    index = PrefixCache(SnapshotKind.STATE, max_bytes=10**6, max_entries=10)
    disk = Tier(CacheTier.DISK, index, lambda n: HEAD_BYTES + TOKEN_BYTES * n)
    disk.min_gain = 1
    engine = Engine(1, fails=fails, disk=disk)
    engine.run(A)
    engine.run([*A[:20], 5])

    assert len(list(engine.scheduler.last_plans())) == n_plans
