"""Sequences that lose their slots and go on later where they were."""

import pytest

from pyllama_raw.core.costs import Captures, CopyPrice
from pyllama_raw.core.memory.snapshots import SnapshotKind
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
    tiers = engine.scheduler.memory.tiers
    engine.scheduler._costs.observe(1000, 0, 1.0)
    tiers._speeds["host"].observe(1000, 1.0)


def test_who_is_dearer_to_copy_than_to_compute_is_not_swapped():
    """
    As on a device whose values lie in another order: a small copy takes longer than a step.
    """

    def dear_captures(engine):
        tiers = engine.scheduler.memory.tiers
        tiers.captures = Captures(
            CopyPrice(base_s=5.0, run_s=5.0, restore_s=5.0),
            engine.scheduler._costs,
            0.1,
        )
        engine.scheduler._costs.observe(1000, 0, 0.1)

    engine, ends = press(prepare=dear_captures)
    stats = engine.scheduler.stats()

    assert [end.n_output for end in ends] == [N_OUTPUT] * 2
    assert (stats.preempted, stats.swapped) == (1, 0)


def test_a_swap_that_was_cleared_is_computed_again():
    """
    Whoever clears the cache means the states of preempted requests, too.
    """
    engine = Engine(2, n_cells=220, n_ctx_slot=140)
    ids = [engine.add(tokens, N_OUTPUT) for tokens in (A, B)]
    while not engine.scheduler.stats().swapped:
        engine.step()
    engine.scheduler.clear_cache()
    while engine.step():
        pass

    assert [engine.ends[i].n_output for i in ids] == [N_OUTPUT] * 2
    assert engine.n_computed > 2 * (len(A) + N_OUTPUT - 1)


def test_a_swap_is_not_loaded_where_a_slot_has_as_much():
    """
    An urgent request went on with the text that the preempted one had so far.
    """
    engine = Engine(1, n_ctx_slot=140, preempt="priority")
    late = engine.add(A, 40, priority=1)
    for _ in range(21):
        engine.step()
    urgent = engine.add(engine.texts[late], 20, priority=0)
    while engine.step():
        pass

    assert [engine.ends[i].n_output for i in (late, urgent)] == [40, 20]
    assert (engine.scheduler.stats().swapped, engine.of(Load)) == (1, [])


def test_a_part_of_a_window_is_not_swapped_where_repeats_are_exact():
    """
    The rest would be computed with other rows beside it than those that it had.
    """
    engine, ends = press(deterministic=True, n_swa=60)
    stats = engine.scheduler.stats()

    assert [end.n_output for end in ends] == [N_OUTPUT] * 2
    assert (stats.preempted, stats.swapped) == (1, 0)


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


@KINDS
def test_a_more_urgent_request_preempts_if_that_is_asked_for(kind):
    """
    The last of the less urgent ones gives its slot up and goes on where it was.
    """
    engine = Engine(2, n_ctx_slot=140, kind=kind, preempt="priority")
    early, late = engine.add(A, 20, priority=1), engine.add(B, 20, priority=1)
    for _ in range(5):
        engine.step()
    [end] = engine.run([300, *A], priority=0)
    stats = engine.scheduler.stats()

    assert list(engine.ends) == [end.request_id, early, late]
    n_preempted = [engine.ends[i].n_preempted for i in (end.request_id, early, late)]
    assert n_preempted == [0, 0, 1]
    assert (stats.preempted, stats.swapped) == (1, 1)
    assert stats.computed_tokens == 2 * (len(A) + 19) + len(A) + 2


@pytest.mark.parametrize("options", [{"preempt": "memory"}, {"n_cells": 150}])
def test_nobody_is_preempted_in_vain(options):
    """
    Not if it was not asked for, and not for one that would not fit beside its equals.
    """
    engine = Engine(2, n_ctx_slot=140, **({"preempt": "priority"} | options))
    first = engine.add(A[:20], 60, priority=0)
    second = engine.add(B[:20], 8, priority=1)
    engine.step()
    [end] = engine.run([300, *A], max_tokens=60, priority=0)

    assert list(engine.ends) == [second, first, end.request_id]
    assert engine.scheduler.stats().preempted == 0


@pytest.mark.parametrize(
    ("victim", "index"), [("latest", 2), ("largest", 0), ("smallest", 1)]
)
def test_the_victim_is_who_is_named(victim, index):
    """
    Of three: the last that came, who holds most, or who holds least.
    """
    engine = Engine(3, n_ctx_slot=64, preempt="priority", victim=victim)
    prompts = (A[:30], B[:10], [tokens + 200 for tokens in A[:20]])
    ids = [engine.add(prompt, 20, priority=1) for prompt in prompts]
    engine.step()
    engine.run([300, 301, 302])

    assert [engine.ends[i].n_preempted for i in ids] == [
        int(i == index) for i in range(3)
    ]


def test_the_largest_is_not_preempted_for_ever():
    """
    After three times others are preempted first; without others it is preempted on.
    """
    engine = Engine(2, n_ctx_slot=64, preempt="priority", victim="largest")
    large, small = engine.add(A, 20, priority=1), engine.add(B[:10], 20, priority=1)
    for _ in range(4):
        engine.step()
        urgent = engine.add([300, 301, 302], 1)
        while urgent not in engine.ends:
            engine.step()
    engine.run()

    assert [engine.ends[i].n_preempted for i in (large, small)] == [3, 1]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("max_bytes", [10**6, 0])
def test_a_shifted_output_keeps_its_slot_if_it_cannot_be_repeated(
    deterministic, max_bytes
):
    """
    With `deterministic` the others give way, or the urgent one waits for its end.
    """
    engine = Engine(
        2,
        n_ctx_slot=20,
        unified=False,
        deterministic=deterministic,
        max_bytes=max_bytes,
        preempt="priority",
        context_full="shift",
    )
    long, short = engine.add(A[:10], 40, priority=1), engine.add(B[:4], 20, priority=1)
    while not engine.scheduler.stats().shifted:
        engine.step()
    engine.run([300, 301, 302], [400, 401, 402], priority=0)

    n_preempted = [engine.ends[i].n_preempted for i in (long, short)]
    assert n_preempted == [0 if deterministic else 1, 1]
