"""A file is read while its request waits: what others do, and what comes of it."""

from array import array
from dataclasses import replace

import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import StoredState, Tier
from pyllama_raw.core.request import CacheTier, FinishReason
from pyllama_raw.core.stats import Eviction
from pyllama_raw.core.step import Copy, Fetch, Load
from pyllama_raw.testing.executor import HEAD_BYTES, TOKEN_BYTES, FakeFile
from tests.core.reuse_support import ANSWER, B, Engine

LONG = [*range(300, 380)]
ASKED = [*LONG, 5, 6]
KINDS = pytest.mark.parametrize("kind", SnapshotKind)


def make_engine(n_slots=3, kind=SnapshotKind.RANGE, **options) -> Engine:
    """Somebody streams, and a file has all of LONG; it is not read before finish()."""
    file = FakeFile(0, tuple(enumerate(LONG)))
    index = PrefixCache(kind.whole, max_bytes=10**6, max_entries=10)
    stored = StoredState(None, array("i", LONG), file, file.n_bytes)
    disk = Tier(CacheTier.DISK, index, lambda n: HEAD_BYTES + TOKEN_BYTES * n, [stored])
    engine = Engine(
        n_slots, kind=kind, disk=disk, n_ctx_slot=128, n_cells=512, **options
    )
    engine.memory.files.add(file)
    engine.add(B, 30)
    engine.step()
    return engine


def finish(engine, **fails) -> None:
    """The oldest file is read, or fails."""
    engine.scheduler.take_report(engine.memory.end_fetch(**fails))


@KINDS
def test_streams_go_on_while_a_file_is_read(kind):
    """
    Its request has a slot and no work; afterwards it goes on from all of the file.
    """
    engine = make_engine(kind=kind)
    waiting = engine.add(ASKED)

    plans = [engine.step() for _ in range(3)]
    lent = engine.cache.n_lent_bytes
    finish(engine)
    engine.run()

    assert [[work.request_id for work in plan.works] for plan in plans] == [[0]] * 3
    assert lent == FakeFile(0, tuple(enumerate(LONG))).n_bytes
    assert engine.cache.n_lent_bytes == 0
    assert (engine.ends[waiting].n_cached, engine.ends[waiting].cache_tier) == (
        len(LONG),
        CacheTier.DISK,
    )
    assert engine.cache.disk.n_hit_tokens_host == len(LONG)


def test_without_streams_nothing_is_done_until_the_file_is_there():
    """
    An empty plan is no stall: the request ends when its file was read.
    """
    engine = make_engine()
    engine.scheduler.cancel(0, 0.0)
    waiting = engine.add(ASKED)

    engine.step()
    nothing = engine.step()
    finish(engine)
    engine.run()

    assert not nothing
    assert engine.ends[waiting].n_cached == len(LONG)


@KINDS
@pytest.mark.parametrize("fails", [(), (Load,)])
def test_a_read_that_fails_is_a_miss(kind, fails):
    """
    So is a load of what was read. The file goes, and the prompt is computed.
    """
    engine = make_engine(kind=kind)
    waiting = engine.add(ASKED)
    engine.step()
    engine.fails = fails

    finish(engine, fails=not fails)
    engine.run()

    end = engine.ends[waiting]
    assert (end.reason, end.n_cached, end.cache_tier) == (FinishReason.LENGTH, 0, None)
    assert engine.cache.disk.n_evictions == {Eviction.DROPPED: 1}
    assert engine.cache.n_lent_bytes == 0
    assert len(engine.of(Fetch)) == 1


def test_after_a_read_that_fails_the_next_best_is_taken():
    """
    A slot has a shorter prefix, which is copied then.
    """
    engine = make_engine()
    engine.run([*LONG[:10], 7, 7], max_tokens=1)
    engine.add([*LONG[:10], *range(70)], 20)
    engine.step()
    waiting = engine.add(ASKED)
    engine.step()

    finish(engine, fails=True)
    engine.run()

    assert len(engine.of(Fetch)) == 1
    assert (engine.ends[waiting].n_cached, engine.ends[waiting].cache_tier) == (
        10,
        CacheTier.LIVE,
    )


@pytest.mark.parametrize(("fails", "n_files"), [(False, 1), (True, 0)])
def test_who_leaves_while_the_file_is_read_leaves_nothing_behind(fails, n_files):
    """
    The slot is free at once, the memory when the file was read; a good file stays.
    """
    engine = make_engine()
    waiting = engine.add(ASKED)
    engine.step()

    engine.scheduler.cancel(waiting, 0.0)
    engine.step()
    lent = engine.cache.n_lent_bytes
    finish(engine, fails=fails)
    engine.step()

    assert engine.ends[waiting].reason is FinishReason.CANCELLED
    assert (lent > 0, engine.cache.n_lent_bytes) == (True, 0)
    assert (engine.cache.disk.n_entries, engine.cache.disk.n_pinned) == (n_files, 0)
    assert engine.of(Load) == []


@KINDS
def test_equal_prompts_read_a_file_once(kind):
    """
    The others wait for the first one, and copy its slot.
    """
    engine = make_engine(kind=kind)
    waiting = [engine.add(ASKED), engine.add(ASKED)]
    engine.step()
    finish(engine)
    engine.run()

    assert len(engine.of(Fetch)) == len(engine.of(Copy)) == 1
    assert [engine.ends[i].n_cached for i in waiting] == [len(LONG)] * 2
    assert [engine.ends[i].cache_tier for i in waiting] == [
        CacheTier.DISK,
        CacheTier.LIVE,
    ]


def test_a_cleared_file_is_not_loaded():
    """
    Who cleared the cache means also what is on its way.
    """
    engine = make_engine()
    waiting = engine.add(ASKED)
    engine.step()

    engine.scheduler.clear_cache()
    finish(engine)
    engine.run()

    assert engine.ends[waiting].n_cached == 0
    assert engine.of(Load) == []


def test_a_file_for_which_host_memory_has_no_room_is_not_read():
    """
    What is on its way counts against max_bytes.
    """
    engine = make_engine(max_bytes=FakeFile(0, tuple(enumerate(LONG))).n_bytes - 1)
    waiting = engine.add(ASKED)

    engine.run()

    assert engine.ends[waiting].n_cached == 0
    assert engine.of(Fetch) == []


def test_a_new_context_takes_the_file_that_is_read():
    """
    The slot was empty before, and is empty now.
    """
    engine = make_engine()
    waiting = engine.add(ASKED)
    engine.step()

    engine.step(breaks=True)
    finish(engine)
    engine.run()

    assert engine.ends[waiting].n_cached == len(LONG)
    assert len(engine.of(Fetch)) == 1


def test_a_file_that_finds_no_cells_any_more_is_a_miss():
    """
    While it was read, those who run have filled them; the file stays.
    """
    engine = make_engine()
    waiting = engine.add(ASKED)
    engine.step()
    slots = engine.scheduler.memory.slots
    slots.limits = replace(slots.limits, n_cells=100)

    finish(engine)
    engine.step()

    assert engine.of(Load) == []
    assert engine.cache.disk.n_entries == 1
    assert engine.cache.n_lent_bytes == 0
    assert waiting not in engine.ends


def test_the_answer_to_a_file_is_right():
    """
    What was read stands in the slot, and the answer follows it.
    """
    engine = make_engine()
    waiting = engine.add(ASKED, 3)
    engine.step()
    finish(engine)
    engine.run()

    assert engine.texts[waiting] == [*ASKED, ANSWER, ANSWER, ANSWER]


def pieces(engine) -> list:
    return [(p.start, p.stop) for load in engine.of(Load) for p in load.pieces]


def test_a_long_file_is_loaded_a_portion_a_step():
    """
    Streams go on in each of these steps; the request goes on when it has all.
    """
    engine = make_engine()
    engine.scheduler.memory.load_tokens = 32
    waiting = engine.add(ASKED)
    engine.step()
    finish(engine)

    plans = [engine.step() for _ in range(3)]
    engine.run()

    assert pieces(engine) == [(0, 32), (32, 64), (64, 80)]
    assert [len(plan.works) for plan in plans] == [1, 1, 2]
    assert not any(plan.steady for plan in plans[:2])
    assert engine.ends[waiting].n_cached == len(LONG)
    assert engine.cache.n_lent_bytes == 0


@pytest.mark.parametrize("n_steps", [1, 2])
def test_who_leaves_between_portions_leaves_what_was_loaded(n_steps):
    """
    The slot keeps it, and the memory of the rest is free.
    """
    engine = make_engine()
    engine.scheduler.memory.load_tokens = 32
    waiting = engine.add(ASKED)
    engine.step()
    finish(engine)
    for _ in range(n_steps):
        engine.step()

    engine.scheduler.cancel(waiting, 0.0)
    engine.step()
    lent = engine.cache.n_lent_bytes
    engine.scheduler.take_report = None  # nothing is read any more
    [end] = engine.run([*LONG[:40], 7, 8, 9], max_tokens=1)

    assert lent == 0
    assert end.n_cached == min(32 * n_steps, 40)


def test_a_portion_that_fails_is_a_miss():
    """
    What was loaded before it is gone, the prompt is computed, and the file goes.
    """
    engine = make_engine()
    engine.scheduler.memory.load_tokens = 32
    waiting = engine.add(ASKED)
    engine.step()
    finish(engine)
    engine.step()
    engine.fails = (Load,)

    engine.run()

    assert engine.ends[waiting].n_cached == 0
    assert engine.cache.disk.n_evictions == {Eviction.DROPPED: 1}
    assert engine.cache.n_lent_bytes == 0


def test_a_new_context_begins_a_load_again():
    """
    The portions before are lost with the old one.
    """
    engine = make_engine()
    engine.scheduler.memory.load_tokens = 32
    waiting = engine.add(ASKED)
    engine.step()
    finish(engine)
    engine.step()

    engine.step(breaks=True)
    engine.run()

    assert pieces(engine)[:3] == [(0, 32), (32, 64), (0, 32)]
    assert engine.ends[waiting].n_cached == len(LONG)


def make_full(**options) -> tuple[Engine, int]:
    """Both slots run, and somebody waits who needs the file."""
    engine = make_engine(n_slots=2, **options)
    engine.add([7] * 20, 20)
    engine.step()
    return engine, engine.add(ASKED)


@KINDS
def test_a_file_is_read_while_its_request_waits_for_a_slot(kind):
    """
    It is in host memory when a slot is free, and loaded at once.
    """
    engine, waiting = make_full(kind=kind)

    plans = [engine.step() for _ in range(3)]
    finish(engine)
    engine.step()
    engine.scheduler.cancel(0, 0.0)
    engine.step()
    loads = engine.of(Load)
    engine.run()

    moves = [move for plan in plans for move in plan.moves]
    assert [move for move in moves if type(move) is Fetch] == engine.of(Fetch)
    assert len(engine.of(Fetch)) == 1
    assert len(loads) == 1
    assert (engine.ends[waiting].n_cached, engine.ends[waiting].cache_tier) == (
        len(LONG),
        CacheTier.DISK,
    )
    assert engine.cache.n_lent_bytes == engine.cache.disk.n_pinned == 0


def test_nothing_is_read_for_who_needs_no_file():
    """
    The next request is waiting about once, and another one has its turn after it.
    """
    engine = make_engine(n_slots=2)
    engine.add([7] * 20, 20)
    engine.step()
    engine.add([8] * 20)
    waiting = engine.add(ASKED)
    for _ in range(3):
        engine.step()
    fetches = engine.of(Fetch)
    engine.scheduler.cancel(2, 0.0)
    engine.step()
    later = engine.of(Fetch)
    finish(engine)
    engine.run()

    assert (fetches, len(later)) == ([], 1)
    assert engine.ends[waiting].n_cached == len(LONG)


def test_who_gets_a_slot_before_its_file_is_read_waits_for_it_there():
    """
    The file is read once.
    """
    engine, waiting = make_full()
    engine.step()
    engine.scheduler.cancel(0, 0.0)
    engine.step()
    finish(engine)
    engine.run()

    assert len(engine.of(Fetch)) == 1
    assert engine.ends[waiting].n_cached == len(LONG)
    assert engine.cache.n_lent_bytes == engine.cache.disk.n_pinned == 0


@pytest.mark.parametrize("is_read", [False, True])
def test_who_leaves_the_queue_leaves_nothing_in_host_memory(is_read):
    """
    Whether its file was read by then, or is read later.
    """
    engine, waiting = make_full()
    engine.step()
    if is_read:
        finish(engine)
        engine.step()

    lent = engine.cache.n_lent_bytes
    engine.scheduler.cancel(waiting, 0.0)
    if not is_read:
        finish(engine)
    engine.step()

    assert lent > 0
    assert engine.cache.n_lent_bytes == engine.cache.disk.n_pinned == 0


def test_a_read_ahead_that_fails_is_a_miss():
    """
    The request is computed when it has a slot.
    """
    engine, waiting = make_full()
    engine.step()
    finish(engine, fails=True)
    engine.step()
    engine.run()

    assert engine.ends[waiting].n_cached == 0
    assert engine.cache.n_lent_bytes == engine.cache.disk.n_pinned == 0


@pytest.mark.parametrize("salt", [None, "other"])
def test_who_comes_first_has_what_was_read_for_another_one(salt):
    """
    A more urgent request with the same beginning takes it, if it may share it.
    """
    engine, waiting = make_full()
    engine.step()
    finish(engine)
    engine.step()
    urgent = engine.add([*LONG, 8, 9], priority=-1, namespace=salt)
    engine.scheduler.cancel(0, 0.0)
    engine.run()

    cached = [engine.ends[i].n_cached for i in (urgent, waiting)]
    assert cached == ([len(LONG)] * 2 if salt is None else [0, len(LONG)])
    assert engine.cache.disk.n_pinned == 0


def test_a_prompt_that_parts_earlier_does_not_get_the_file_of_another_one():
    """
    It is computed, and the file waits for the one that it was read for.
    """
    engine, waiting = make_full()
    engine.step()
    finish(engine)
    engine.step()
    urgent = engine.add([*LONG[:10], 8, 9], priority=-1)
    engine.scheduler.cancel(0, 0.0)
    engine.step()
    lent = engine.cache.n_lent_bytes
    engine.run()

    assert lent > 0
    assert engine.ends[waiting].n_cached == len(LONG)
    assert engine.ends[urgent].n_output == 2
    assert engine.cache.disk.n_pinned == 0


def test_what_is_forgotten_is_not_loaded_though_it_was_read():
    """
    clear_cache() between the read and the slot: the prompt is computed.
    """
    engine, waiting = make_full()
    engine.step()
    finish(engine)
    engine.step()
    engine.scheduler.clear_cache()
    engine.run()

    assert engine.ends[waiting].n_cached == 0
    assert engine.cache.disk.n_pinned == 0


def test_a_slot_that_has_as_much_by_then_is_taken_instead():
    """
    The one that ran has computed the same prompt meanwhile.
    """
    engine = make_engine(n_slots=2)
    engine.add([*LONG, 1, 2], 20, namespace="other")
    engine.step()
    waiting = engine.add(ASKED)
    engine.step()
    finish(engine)
    engine.step()
    twin = engine.add([*LONG, 3, 4], priority=-1)
    engine.scheduler.cancel(0, 0.0)
    engine.run()

    assert engine.ends[twin].cache_tier is CacheTier.DISK
    assert engine.ends[waiting].n_cached == len(LONG)
    assert engine.cache.disk.n_pinned == 0


def test_nothing_is_read_ahead_where_those_that_run_may_need_the_memory():
    """
    Host memory has room for one such file, and not for two.
    """
    file = FakeFile(0, tuple(enumerate(LONG)))
    engine, waiting = make_full(max_bytes=file.n_bytes * 3 // 2)

    engine.step()
    ahead = engine.of(Fetch)
    while not engine.ends.get(waiting):
        engine.step()
        while engine.memory.reading:
            finish(engine)

    assert ahead == []
    assert engine.ends[waiting].reason is FinishReason.LENGTH
