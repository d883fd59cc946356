"""What the prefix cache has room for, and what leaves it, one rule a test."""

from __future__ import annotations

import pytest

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.stats import Refusal
from tests.core.cache_support import find, held, make_cache, spans, store, toks

RANGE, STATE, EXACT, CHAIN = SnapshotKind
ALL = pytest.mark.parametrize("kind", SnapshotKind)


# Limits


@ALL
def test_limit_is_exact(kind):
    """
    An entry that fills the limit to the last byte is stored; one byte more is not.
    """
    cache = make_cache(kind, max_bytes=120)

    assert store(cache, "hello", n_bytes=101) is None
    assert store(cache, "hello", n_bytes=100) is not None
    assert cache.stats().n_bytes == 120


def test_oversized_snapshot_evicts_nothing():
    """
    What can never fit is refused before anything is evicted for it.
    """
    cache = make_cache(STATE, max_bytes=500)
    store(cache, "hello")

    assert store(cache, "world", n_bytes=500) is None
    assert held(cache) == 1
    assert cache.stats().n_refusals == {Refusal.TOO_BIG: 1}


def test_pinned_entries_leave_no_room():
    """
    What does not fit beside pinned entries is refused, and nothing is evicted.
    """
    cache = make_cache(STATE, max_bytes=300)
    store(cache, "hello")
    store(cache, "other")
    cache.pin(find(cache, "hello!"))

    assert store(cache, "world", n_bytes=200) is None
    assert held(cache) == 2
    assert cache.stats().n_refusals == {Refusal.NO_ROOM: 1}


@pytest.mark.parametrize(
    ("n_bytes", "evicted"), [(116, ["aaaaa"]), (117, ["aaaaa", "bbbbb"])]
)
@ALL
def test_eviction_counts_every_byte(kind, n_bytes, evicted):
    """
    Of two entries of 120 bytes one makes room for 120 more, but not for 121.
    """
    cache = make_cache(kind, max_bytes=240)
    store(cache, "aaaaa")
    store(cache, "bbbbb")
    n_before = held(cache)
    store(cache, "c", n_bytes=n_bytes)

    assert (n_before, cache.take_released()) == (2, evicted)


@ALL
def test_reserved_room_is_taken(kind):
    """
    Room promised to one capture is not promised to another.
    """
    cache = make_cache(kind, max_bytes=240)
    plans = [cache.plan_store("model", toks(text), 5) for text in ("aaaaa", "bbbbb")]
    first = cache.reserve(plans[0], 101)

    assert cache.reserve(plans[1], 100) is None
    assert cache.reserve(plans[1], 99) is not None
    assert first.n_charged == 121


def test_refused_capture_leaves_no_pins():
    """
    The ground of a capture that is not made may be evicted again.
    """
    cache = make_cache(RANGE, max_bytes=200)
    store(cache, "hello")

    assert store(cache, "hello world", n_bytes=150) is None
    assert cache.stats().n_pinned == 0


@pytest.mark.parametrize("limits", [{"max_bytes": 0}, {"max_entries": 0}])
def test_zero_turns_the_cache_off(limits):
    """
    A limit of 0 stores nothing.
    """
    assert store(make_cache(STATE, **limits), "hello") is None


def test_smaller_snapshot_gives_back_the_rest():
    """
    Room reserved for an estimate shrinks to what was captured.
    """
    cache = make_cache(STATE)
    plan = cache.plan_store("model", toks("hello"), 5)
    reservation = cache.reserve(plan, 1000)
    before = cache.stats().n_reserved_bytes
    cache.commit(reservation, "hello", 60)

    assert (before, cache.stats().n_reserved_bytes, cache.stats().n_bytes) == (
        1020,
        0,
        80,
    )


# Eviction


@ALL
def test_least_recently_used_goes_first(kind):
    """
    A recorded hit protects its entry.
    """
    cache = make_cache(kind, max_entries=2)
    store(cache, "hello")
    store(cache, "world")
    cache.record(find(cache, "hello!"))
    store(cache, "third")

    assert cache.take_released() == ["world"]


def test_match_alone_protects_nothing():
    """
    Looking does not count as use.
    """
    cache = make_cache(STATE, max_entries=2)
    store(cache, "hello")
    store(cache, "world")
    find(cache, "hello!")
    store(cache, "third")

    assert cache.take_released() == ["hello"]


def test_ranges_go_from_the_ends():
    """
    A range that others build on is evicted after them, however old.
    """
    cache = make_cache(RANGE, max_entries=3)
    for text in ("ab", "abcd", "abxy"):
        store(cache, text)
    store(cache, "new1")
    store(cache, "new2")

    assert cache.take_released() == ["abcd", "abxy"]
    assert spans(find(cache, "abxy")) == [("ab", 0, 2)]


def test_branch_point_goes_when_its_branches_are_gone():
    """
    Nothing of a tree is unevictable for ever.
    """
    cache = make_cache(RANGE, max_entries=2)
    store(cache, "abcd")
    store(cache, "abxy")
    for text in ("new1", "new2"):
        store(cache, text)

    assert cache.take_released() == ["abxy", "abcd"]


@ALL
def test_pinned_entries_stay(kind):
    """
    However long ago it was used, a pinned entry is not evicted.
    """
    cache = make_cache(kind, max_entries=2)
    store(cache, "hello")
    store(cache, "world")
    cache.pin(find(cache, "hello!"))
    store(cache, "third")

    assert find(cache, "hello!").n_tokens == 5
    assert cache.take_released() == ["world"]


@ALL
def test_unpinned_entries_can_be_evicted_again(kind):
    """
    A pin that was in the way of an eviction is forgotten with unpin().
    """
    cache = make_cache(kind, max_entries=2)
    store(cache, "hello")
    store(cache, "world")
    hit = find(cache, "hello!")
    cache.pin(hit)
    cache.pin(hit)
    store(cache, "third")
    cache.unpin(hit)
    cache.unpin(hit)
    store(cache, "fourth")

    assert cache.take_released() == ["world", "hello"]


def test_the_least_recently_used_goes_first():
    """
    Neither age, size nor the number of uses counts.
    """
    cache = make_cache(EXACT, max_entries=3)
    store(cache, "aaaa", n_bytes=10)
    store(cache, "bbbb", n_bytes=1000)
    cache.record(find(cache, "bbbb!"))
    cache.record(find(cache, "aaaa!"))
    store(cache, "cccc", n_bytes=10)
    store(cache, "dddd", n_bytes=10)

    assert cache.take_released() == ["bbbb"]


def test_dropped_entries_do_not_pile_up():
    """
    Entries that leave without being evicted take no memory for long.
    """
    cache = make_cache(STATE)
    for n in range(1000):
        cache.drop(store(cache, f"{n}"))
    cache.take_released()

    assert held(cache) == 0
    assert len(cache._queue._heap) <= 64
