"""Entries that are dropped, cleared, pinned and counted, one rule a test."""

from __future__ import annotations

import pytest

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import Adapted
from pyllama_raw.core.stats import Eviction
from tests.core.cache_support import find, make_cache, store, toks

RANGE, STATE, EXACT, CHAIN = SnapshotKind
ALL = pytest.mark.parametrize("kind", SnapshotKind)


# What was dropped or cleared


@ALL
def test_failed_restore_is_forgotten(kind):
    """
    A dropped entry is not found again, and dropping twice is the same.
    """
    cache = make_cache(kind)
    entry = store(cache, "hello")
    cache.drop(entry)
    cache.drop(entry)

    assert find(cache, "hello!").n_matched == 0
    assert cache.take_released() == ["hello"]
    assert cache.stats().n_evictions == {Eviction.DROPPED: 1}


def test_dropped_range_takes_what_builds_on_it():
    """
    Ranges after a dropped one are of no use; ranges before it are.
    """
    cache = make_cache(RANGE)
    store(cache, "ab")
    entry = store(cache, "abcdef")
    for text in ("abcdef gh", "abcdxx", "abyy"):
        store(cache, text)
    cache.drop(entry)

    assert sorted(cache.take_released()) == ["abcdef", "abcdef gh", "abcdxx"]
    assert find(cache, "abcdef").n_tokens == 2
    assert find(cache, "abyyy").n_tokens == 4


@ALL
def test_dropped_while_pinned(kind):
    """
    A dropped entry cannot be found; its bytes count until it is unpinned.
    """
    cache = make_cache(kind)
    entry = store(cache, "hello")
    hit = find(cache, "hello!")
    cache.pin(hit)
    cache.drop(entry)
    n_bytes, released = cache.stats().n_bytes, cache.take_released()
    cache.unpin(hit)

    assert (find(cache, "hello!").n_tokens, n_bytes, released) == (0, 120, [])
    assert cache.stats().n_bytes == 0
    assert cache.take_released() == ["hello"]


@ALL
def test_clear_one_namespace(kind):
    """
    Other namespaces keep their entries; the freed bytes are told.
    """
    cache = make_cache(kind)
    store(cache, "hello", namespace="a")
    store(cache, "help", namespace="a")
    store(cache, "hello", namespace="b")
    n_bytes = cache.stats().n_bytes

    n_freed = cache.clear("a")

    assert n_freed == n_bytes - 120
    assert find(cache, "hello!", namespace="a").n_matched == 0
    assert find(cache, "hello!", namespace="b").n_tokens == 5


@ALL
def test_clear_all(kind):
    """
    Without a namespace everything goes, and an unknown one frees nothing.
    """
    cache = make_cache(kind)
    store(cache, "hello", namespace="a")
    store(cache, "hello", namespace="b")

    assert [cache.clear("c"), cache.clear(), cache.clear()] == [0, 240, 0]


def test_clear_a_salt_whatever_the_adapters():
    """
    A caller's entries go with any adapters, and nobody else's.
    """
    adapted = [Adapted("x", "a"), Adapted("y", "a"), Adapted("x", "b")]
    cache, names = make_cache(RANGE), ["a", *adapted]
    for namespace in names:
        store(cache, "hello", namespace=namespace)
    cache.clear("a")

    found = [find(cache, "hello!", namespace=each).n_tokens for each in names]
    assert found == [0, 0, 0, 5]
    cache.check_integrity()


@ALL
def test_clear_while_capturing(kind):
    """
    What was being captured when its salt was cleared is not stored, whatever its adapters.
    """
    cache = make_cache(kind)
    kept = cache.reserve(cache.plan_store("b", toks("hello"), 5), 100)
    adapted = Adapted("x", "a")
    lost = cache.reserve(cache.plan_store(adapted, toks("hello"), 5), 100)
    cache.clear("a")

    assert cache.commit(lost, "lost", 100) is None
    assert cache.commit(kept, "kept", 100) is not None
    assert cache.take_released() == ["lost"]


# Broken promises of the caller


def test_pin_after_the_entry_left():
    """
    A hit is good until the cache changes: pinning it later is a bug of the caller.
    """
    cache = make_cache(STATE)
    store(cache, "hello")
    hit = find(cache, "hello!")
    cache.clear()

    with pytest.raises(AssertionError, match="too late"):
        cache.pin(hit)


def test_unpin_without_pin():
    """
    Pins and unpins are pairs.
    """
    cache = make_cache(STATE)
    store(cache, "hello")

    with pytest.raises(AssertionError, match="not pinned"):
        cache.unpin(find(cache, "hello!"))


def test_reservation_ends_once():
    """
    A reservation is committed or abandoned, not both.
    """
    cache = make_cache(STATE)
    reservation = cache.reserve(cache.plan_store("model", toks("hello"), 5), 100)
    cache.abandon(reservation)

    with pytest.raises(AssertionError, match="twice"):
        cache.commit(reservation, "hello", 100)


def test_more_captured_than_reserved():
    """
    The estimate is an upper bound: beyond it the limit could not be kept.
    """
    cache = make_cache(STATE)
    reservation = cache.reserve(cache.plan_store("model", toks("hello"), 5), 100)

    with pytest.raises(AssertionError, match="more than was reserved"):
        cache.commit(reservation, "hello", 101)


# Counting


def test_queries_are_counted_in_tokens():
    """
    Each prompt token was served live, from the host, or computed.
    """
    cache = make_cache(EXACT)
    store(cache, "hello")
    cache.record(find(cache, "hello world"))
    cache.record(find(cache, "hello world"), n_live=2)
    cache.record(find(cache, "hello world"), n_live=8)
    cache.record(find(cache, "help"))

    stats = cache.stats()
    assert (stats.n_queries, stats.n_query_tokens) == (4, 37)
    assert (stats.n_hit_tokens_host, stats.n_hit_tokens_live) == (8, 10)
    assert stats.n_sparse_tokens == 3
    assert (stats.n_stores, stats.n_stored_tokens) == (1, 5)


def test_pins_are_counted_once_an_entry():
    """
    n_pinned counts entries, however many restores use them.
    """
    cache = make_cache(STATE)
    store(cache, "hello")
    hit = find(cache, "hello!")
    cache.pin(hit)
    cache.pin(hit)

    assert cache.stats().n_pinned == 1
