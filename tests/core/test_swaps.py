"""Sequences that lose their slots and go on later where they were."""

import pytest

from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.step import Load, Save
from tests.core.reuse_support import A, B, Engine

KINDS = pytest.mark.parametrize("kind", SnapshotKind)
N_OUTPUT = 90  # more than is promised at the start


def press(*, kind=SnapshotKind.RANGE, prepare=lambda _: None, **options):
    """Two requests that do not fit together, to their ends."""
    engine = Engine(2, n_cells=220, n_ctx_slot=140, kind=kind, **options)
    prepare(engine)
    ends = engine.run(A, B, max_tokens=N_OUTPUT)
    return engine, ends


@KINDS
def test_who_is_preempted_goes_on_where_it_was(kind):
    """
    No token is computed twice: what the slot held is loaded again.
    """
    engine, ends = press(kind=kind)
    stats = engine.scheduler.stats()

    assert [end.n_preempted for end in ends] == [0, 1]
    assert [end.n_output for end in ends] == [N_OUTPUT] * 2
    assert stats.computed_tokens == 2 * (len(A) + N_OUTPUT - 1)
    assert (stats.preempted, stats.swapped) == (1, 1)


@KINDS
@pytest.mark.parametrize("failing", [Save, Load])
def test_a_swap_that_fails_is_computed_again(kind, failing):
    """
    Whether it could not be saved or not be loaded, the output is the same.
    """
    engine, ends = press(kind=kind, fails=(failing,))
    stats = engine.scheduler.stats()

    assert [end.n_output for end in ends] == [N_OUTPUT] * 2
    assert stats.computed_tokens > 2 * (len(A) + N_OUTPUT - 1)
    assert (stats.preempted, stats.swapped) == (1, 0 if failing is Save else 1)


def test_without_room_it_is_computed_again():
    """
    A state that is larger than the limit of snapshots is not saved.
    """
    engine, ends = press(max_bytes=500)

    assert [end.n_output for end in ends] == [N_OUTPUT] * 2
    assert engine.scheduler.stats().swapped == 0


def test_who_is_sooner_computed_is_not_swapped():
    """
    By the speeds measured so far, both ways of the bytes against the tokens.
    """
    engine, _ = press(prepare=slow_copies)
    stats = engine.scheduler.stats()

    assert (stats.preempted, stats.swapped) == (1, 0)


def slow_copies(engine):
    tiers = engine.scheduler._memory._tiers
    engine.scheduler._speed.observe(1000, 1.0)
    tiers._speeds["host"].observe(1000, 1.0)


@pytest.mark.parametrize("deterministic", [True, False])
def test_who_is_cancelled_while_it_is_saved_leaves_nothing(deterministic):
    """
    The step that saves it still runs then.
    """
    engine = Engine(2, n_cells=220, n_ctx_slot=140, deterministic=deterministic)
    engine.add(A, N_OUTPUT)
    late = engine.add(B, N_OUTPUT)

    def cancel():
        if engine.scheduler.stats().preempted:
            engine.scheduler.cancel(late, 0.0)

    while late not in engine.ends:
        engine.step(cancel)

    assert (engine.cache.n_pinned, engine.scheduler.stats().swapped) == (0, 0)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_cancelled_request_frees_its_swap(deterministic):
    """
    What it alone could use is gone; the rest may be evicted.
    """
    engine = Engine(2, n_cells=220, n_ctx_slot=140, deterministic=deterministic)
    engine.add(A, N_OUTPUT)
    late = engine.add(B, N_OUTPUT)
    while not engine.scheduler.stats().swapped:
        engine.step()
    before = engine.cache
    engine.scheduler.cancel(late, 0.0)
    after = engine.cache

    assert (before.n_pinned, after.n_pinned) == (1, 0)
    assert (after.n_bytes < before.n_bytes) == deterministic
