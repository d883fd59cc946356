"""The prefix cache, one rule a test."""

from __future__ import annotations

from array import array

import pytest

from pyllama_raw.core.cache_entry import Entry
from pyllama_raw.core.cache_stats import Eviction, Refusal
from pyllama_raw.core.eviction import ORDER_KEYS, EvictionQueue, cost_aware, lru
from pyllama_raw.core.snapshot_kind import SnapshotKind
from pyllama_raw.core.snapshot_points import snapshot_points
from tests.core.cache_support import find, held, make_cache, spans, store, toks

RANGE, STATE, EXACT = SnapshotKind
ALL = pytest.mark.parametrize("kind", SnapshotKind)


# What a prompt may restore


@ALL
def test_empty_cache_has_nothing(kind):
    """
    A miss is a hit of no tokens.
    """
    hit = find(make_cache(kind), "hello")

    assert (hit.n_tokens, hit.spans, hit.n_matched, hit.n_prompt) == (0, (), 0, 5)


@ALL
def test_stored_prompt_is_found(kind):
    """
    A longer prompt restores all of what was stored.
    """
    cache = make_cache(kind)
    store(cache, "hello")

    hit = find(cache, "hello world")

    assert hit.n_tokens == 5
    assert spans(hit) == [("hello", 0, 5)]


@pytest.mark.parametrize(("kind", "n_tokens"), [(RANGE, 4), (STATE, 4), (EXACT, 0)])
def test_last_prompt_token_is_never_restored(kind, n_tokens):
    """
    The limit holds even if more is stored: one token must be computed for its logits.
    """
    cache = make_cache(kind)
    store(cache, "hello")

    assert find(cache, "hello").n_tokens == n_tokens


@pytest.mark.parametrize(("kind", "n_tokens"), [(RANGE, 3), (STATE, 3), (EXACT, 0)])
def test_part_of_a_snapshot(kind, n_tokens):
    """
    Attention memory can be trimmed to where prompts part; other memory cannot.
    """
    cache = make_cache(kind)
    store(cache, "hello")

    hit = find(cache, "help me")

    assert (hit.n_tokens, hit.n_matched) == (n_tokens, 3)


@ALL
def test_namespaces_do_not_share(kind):
    """
    What one namespace stored, another neither finds nor holds to be stored.
    """
    cache = make_cache(kind)
    store(cache, "hello", namespace="tenant 1")

    assert find(cache, "hello world", namespace="tenant 2").n_matched == 0
    assert store(cache, "hello", namespace="tenant 2") is not None


def test_ranges_are_restored_as_a_chain():
    """
    Each branch captures only what its path has not, and restores what it shares.
    """
    cache = make_cache(RANGE)
    store(cache, "hello world")
    plan = cache.plan_store("model", toks("hello there"), 11)
    branch = store(cache, "hello there")

    hit = find(cache, "hello there, friend")

    assert (plan.start, plan.stop) == (6, 11)
    assert branch.n_tokens == 5
    assert spans(hit) == [("hello world", 0, 6), ("hello there", 6, 11)]


def test_range_that_others_build_on_is_still_one_span():
    """
    Branches split the tree, not the snapshots.
    """
    cache = make_cache(RANGE)
    for text in ("abcdef", "abxx", "abcdyy"):
        store(cache, text)

    assert spans(find(cache, "abcdef!")) == [("abcdef", 0, 6)]


def test_state_below_the_junction_serves():
    """
    Any state that starts with the shared tokens is good for them.
    """
    cache = make_cache(STATE)
    store(cache, "hello world")
    store(cache, "hello there")

    assert spans(find(cache, "hello you")) == [("hello world", 0, 6)]


def test_longer_state_replaces_its_lineage():
    """
    One state a lineage: the longest serves every shorter prefix.
    """
    cache = make_cache(STATE)
    store(cache, "hello")
    store(cache, "hello world")

    assert spans(find(cache, "hello")) == [("hello world", 0, 4)]
    assert cache.take_released() == ["hello"]
    assert cache.stats().n_evictions == {Eviction.REPLACED: 1}


def test_pinned_state_is_not_replaced():
    """
    A state that is being restored outlives a longer one.
    """
    cache = make_cache(STATE)
    store(cache, "hello")
    cache.pin(find(cache, "hello!"))
    store(cache, "hello world")

    assert find(cache, "hellx").entries[0].payload == "hello"
    assert cache.stats().n_evictions == {}


def test_replaced_state_makes_room_first():
    """
    When space is short, what the new state replaces goes before the least used.
    """
    cache = make_cache(STATE, max_entries=2)
    store(cache, "another")
    store(cache, "hello")
    store(cache, "hello world")

    assert cache.take_released() == ["hello"]


def test_exact_points_are_kept_along_a_path():
    """
    The deepest point that is reached counts; points above it stay.
    """
    cache = make_cache(EXACT)
    for text in ("he", "hell", "hello"):
        store(cache, text)

    assert spans(find(cache, "hello")) == [("hell", 0, 4)]
    assert spans(find(cache, "help")) == [("he", 0, 2)]


# Capturing


@ALL
def test_what_is_stored_is_not_captured_again(kind):
    """
    A snapshot of the same tokens is not planned twice.
    """
    cache = make_cache(kind)
    store(cache, "hello")

    assert cache.plan_store("model", toks("hello world"), 5) is None


@pytest.mark.parametrize(("kind", "planned"), [(RANGE, 0), (STATE, 0), (EXACT, 1)])
def test_shorter_prefix_needs_no_snapshot_of_its_own(kind, planned):
    """
    Only exact points must be captured one by one.
    """
    cache = make_cache(kind)
    store(cache, "hello")

    assert (cache.plan_store("model", toks("hello"), 3) is not None) == planned


@ALL
def test_two_captures_of_the_same_tokens(kind):
    """
    While tokens are being captured, no other sequence captures them too.
    """
    cache = make_cache(kind)
    first = cache.plan_store("model", toks("hello"), 5)
    cache.reserve(first, 100)

    assert cache.plan_store("model", toks("hello"), 5) is None
    assert cache.plan_store("other", toks("hello"), 5) is not None


def test_late_plan_is_refused():
    """
    A plan holds until the cache changes what it planned.
    """
    cache = make_cache(RANGE)
    plan = cache.plan_store("model", toks("hello"), 5)
    store(cache, "hel")

    assert cache.reserve(plan, 100) is None
    assert cache.stats().n_refusals == {Refusal.STALE: 1}


def test_plan_of_tokens_under_capture_is_refused():
    """
    Two plans made before either reserved do not both get room.
    """
    cache = make_cache(RANGE)
    plans = [cache.plan_store("model", toks("hello"), 5) for _ in range(2)]

    assert [cache.reserve(plan, 100) is None for plan in plans] == [False, True]


def test_shorter_state_captured_meanwhile_is_let_go():
    """
    A state that a longer one overtook is released, not stored.
    """
    cache = make_cache(STATE)
    plan = cache.plan_store("model", toks("hello"), 5)
    reservation = cache.reserve(plan, 100)
    store(cache, "hello world")

    assert cache.commit(reservation, "late", 100) is None
    assert cache.take_released() == ["late"]
    assert cache.stats().n_refusals == {Refusal.COVERED: 1}


@ALL
def test_failed_capture_gives_its_room_back(kind):
    """
    After abandon() nothing is held and the same capture may be tried again.
    """
    cache = make_cache(kind)
    plan = cache.plan_store("model", toks("hello"), 5)
    cache.abandon(cache.reserve(plan, 100))

    stats = cache.stats()
    assert (stats.n_reserved, stats.n_reserved_bytes, stats.n_bytes) == (0, 0, 0)
    assert stats.n_refusals == {Refusal.ABANDONED: 1}
    assert cache.plan_store("model", toks("hello"), 5) == plan


def test_ground_of_a_capture_is_not_evicted():
    """
    The ranges a new range builds on stay while it is captured.
    """
    cache = make_cache(RANGE, max_entries=2)
    store(cache, "hel")
    plan = cache.plan_store("model", toks("hello"), 5)
    reservation = cache.reserve(plan, 100)

    assert store(cache, "other") is None
    assert cache.commit(reservation, "hello", 100) is not None
    assert spans(find(cache, "hello!")) == [("hel", 0, 3), ("hello", 3, 5)]


def test_capture_that_lost_its_ground_is_let_go():
    """
    If the range it builds on was dropped meanwhile, a range is of no use.
    """
    cache = make_cache(RANGE)
    ground = store(cache, "hel")
    plan = cache.plan_store("model", toks("hello"), 5)
    reservation = cache.reserve(plan, 100)
    cache.drop(ground)

    assert cache.commit(reservation, "hello", 100) is None
    assert sorted(cache.take_released()) == ["hel", "hello"]
    assert held(cache) == 0


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


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("lru", "bbbb"),
        ("lfu", "cccc"),
        ("fifo", "aaaa"),
        ("size_aware", "bbbb"),
        ("cost_aware", "bbbb"),
    ],
)
def test_strategies(name, victim):
    """
    a is old, small and used twice; b is big and used once; c is the newest.
    """
    cache = make_cache(EXACT, max_entries=3, order_key=ORDER_KEYS[name])
    store(cache, "aaaa", n_bytes=10)
    store(cache, "bbbb", n_bytes=1000)
    cache.record(find(cache, "bbbb!"))
    cache.record(find(cache, "aaaa!"))
    cache.record(find(cache, "aaaa!"))
    store(cache, "cccc", n_bytes=10)
    store(cache, "dddd", n_bytes=10)

    assert cache.take_released() == [victim]


def test_value_fades_without_use():
    """
    Cost-aware eviction gives up what was valuable long ago.
    """
    cache = make_cache(EXACT, max_entries=2, order_key=cost_aware)
    store(cache, "valuable", n_bytes=10)
    store(cache, "x", n_bytes=500)
    for _ in range(20_000):
        cache.record(find(cache, "x!"))
    store(cache, "new", n_bytes=10)

    assert cache.take_released() == ["valuable"]


def test_queue_lets_go_of_dropped_entries():
    """
    Entries that leave without being evicted do not pile up.
    """
    queue = EvictionQueue(lru)
    for n in range(10_000):
        queue.push(Entry(n, "model", 0, 1, 1, None))

    assert len(queue) <= 64


def test_queue_without_candidates():
    """
    If nothing may go, nothing does.
    """
    queue = EvictionQueue(lru)
    queue.push(Entry(0, "model", 0, 1, 1, None))

    assert queue.pop(lambda entry: False) is None


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


@ALL
def test_clear_while_capturing(kind):
    """
    What was being captured when its namespace was cleared is not stored.
    """
    cache = make_cache(kind)
    kept = cache.reserve(cache.plan_store("b", toks("hello"), 5), 100)
    lost = cache.reserve(cache.plan_store("a", toks("hello"), 5), 100)
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


# Where to take snapshots


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("hello you", (6,)),  # parts inside an edge
        ("hello world peace", ()),  # continues a path
        ("hello wor", ()),  # is all known
        ("other", ()),  # shares nothing
    ],
)
def test_junctions_with_stored_paths(tokens, expected):
    """
    A junction is where a prompt parts from a path, not where it continues one.
    """
    cache = make_cache(EXACT)
    store(cache, "hello world")

    assert cache.junctions("model", toks(tokens)) == expected


def test_junctions_with_running_sequences():
    """
    Sequences that run now count as known paths.
    """
    others = [toks("hello world"), toks("help"), toks("hello"), toks("x")]

    junctions = make_cache(EXACT).junctions("model", toks("hello you"), others)

    assert junctions == (3, 6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (9,)),
        ({"n_tail": 0}, ()),
        ({"interval": 4}, (4, 8, 9)),
        ({"interval": 5, "n_tail": 0}, (5,)),
        ({"junctions": [3], "cache_points": [9, 3, 7]}, (3, 7, 9)),
        ({"junctions": [0, 10], "cache_points": [-1, 99]}, (9,)),
    ],
)
def test_snapshot_points_of_ten_tokens(options, expected):
    """
    Points rise, are distinct, and lie inside the prompt.
    """
    assert snapshot_points(10, **options) == expected


def test_one_token_has_no_snapshot_point():
    """
    A prompt of one token can restore nothing.
    """
    assert snapshot_points(1, interval=1) == ()


@ALL
def test_integrity_check_sees_a_wrong_sum(kind):
    """
    The conservation laws are checked against what is really held.
    """
    cache = make_cache(kind)
    store(cache, "hello").n_bytes += 1

    with pytest.raises(AssertionError):
        cache.check_integrity()


@ALL
def test_limit_is_the_number_of_tokens_searched(kind):
    """
    A caller may ask for less than the prompt, as for the part before an image.
    """
    cache = make_cache(kind)
    store(cache, "he")

    hit = cache.match("model", array("i", toks("hello")), 2)

    assert (hit.n_tokens, hit.n_matched) == (2, 2)
