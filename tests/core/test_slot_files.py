"""What a slot holds, copied for a file and brought back from one."""

from array import array

import pytest

from pyllama_raw.core.memory.memory import SLOT_SAVE
from pyllama_raw.core.memory.slots import Contents
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import CacheTier, Span
from pyllama_raw.core.step import Load, StepResult
from tests.core.reuse_support import ANSWER, A, B, Engine

KINDS = pytest.mark.parametrize("kind", SnapshotKind)


def moved(engine, plan):
    engine.scheduler.check_integrity()
    saved, lost = engine.memory.run(plan.moves)
    return StepResult(saved=saved, not_restored=lost)


def copied(engine, slot):
    """Contents of a slot, and their state; None if it holds nothing for others."""
    copy = engine.scheduler.memory.plan_copy(slot)
    if copy is None:
        return None
    contents, plan = copy
    result = moved(engine, plan)
    engine.scheduler.memory.settle(result)
    return contents, result.saved[SLOT_SAVE].payload


def fill(engine, contents, payload):
    """Whether *contents* are in their slot now."""
    plan = engine.scheduler.memory.plan_fill(contents, payload)
    if plan is None:
        return False
    result = moved(engine, plan)
    engine.scheduler.memory.settle(result)
    engine.scheduler.check_integrity()
    return contents.slot not in result.not_restored


@KINDS
def test_another_engine_goes_on_from_a_copy(kind):
    """
    The next turn of its chat computes what is new; another namespace has nothing of it.
    """
    engine, other = Engine(kind=kind), Engine(kind=kind)
    engine.run(A)
    contents, payload = copied(engine, 0)
    is_filled = fill(other, contents._replace(slot=1), payload)
    [end] = other.run([*A, ANSWER, *B[:10]])
    private = Engine(kind=kind)
    fill(private, contents._replace(namespace="mine"), payload)
    [cold] = private.run([*A, ANSWER, *B[:10]])

    assert (list(contents.tokens), is_filled) == ([*A, ANSWER], True)
    assert (end.n_cached, end.cache_tier) == (len(A) + 1, CacheTier.LIVE)
    assert cold.n_cached == 0


def test_a_slot_that_has_nothing_for_others_is_not_copied():
    """
    Empty, with a request, or with rows of an image.
    """
    engine = Engine()
    empty = copied(engine, 0)
    engine.add(A)
    engine.step()
    running = copied(engine, 0)
    is_filled = fill(engine, Contents(0, None, array("i", B)), ())
    shown = Engine()
    shown.run(A)
    shown.scheduler.memory.slots.all[0].spans = (Span(3, 9, 6),)

    assert (empty, running, is_filled) == (None, None, False)
    assert copied(shown, 0) is None


def test_a_copy_takes_the_place_of_what_a_slot_holds():
    """
    And the cells of slots that nobody has used for longest, but none of a running one. What
    others may have of it is saved before.
    """
    engine = Engine(n_cells=64)
    engine.run(A)
    contents, payload = copied(engine, 0)
    engine.run(B)
    is_filled = fill(engine, contents._replace(slot=1), payload)
    [end] = engine.run([*B, ANSWER, *A[:9]])
    engine.scheduler.memory.slots.all[0].is_usable = False
    is_filled_again = fill(engine, contents, payload)
    engine.add([7] * 40, max_tokens=9)
    engine.step()
    has_room = fill(engine, contents, payload)
    too_long = fill(engine, contents._replace(tokens=array("i", range(65))), payload)

    assert (is_filled, end.n_cached, end.cache_tier) == (
        True,
        len(B) + 1,
        CacheTier.HOST,
    )
    assert is_filled_again
    assert (has_room, too_long) == (False, False)


def test_a_state_that_cannot_be_loaded_leaves_the_slot_empty():
    """
    The next request computes all.
    """
    engine = Engine()
    engine.run(A)
    contents, payload = copied(engine, 0)
    other = Engine(fails={Load})
    is_filled = fill(other, contents, payload)
    [end] = other.run([*A, ANSWER, *B[:10]])

    assert (is_filled, end.n_cached) == (False, 0)


def test_a_request_has_the_slot_that_it_names_if_no_other_one_runs_in_it():
    """
    With what the cache has of its prompt, also from another slot; else any slot, without a wait.
    """
    engine = Engine()
    engine.run(A, slot=1)
    counts = [place.n_held for place in engine.scheduler.memory.slots.all]
    [copied_end] = engine.run([*A, *B[:10]], slot=0)
    first, second = (engine.add(tokens, 9, slot=1) for tokens in (A, B))
    engine.step()
    slots = {
        running.request.request_id: running.slot
        for running in engine.scheduler.memory.slots.running.values()
    }

    assert counts == [0, len(A) + 1]
    assert copied_end.n_cached == len(A)
    assert slots[first] == 1
    assert slots[second] != 1
