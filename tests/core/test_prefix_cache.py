"""What the prefix cache finds and captures, one rule a test."""

from __future__ import annotations

from array import array

import pytest

from pyllama_raw.core.memory.snapshots import SnapshotKind, snapshot_points, spaced
from pyllama_raw.core.stats import Eviction, Refusal
from tests.core.cache_support import find, held, make_cache, spans, store, toks

RANGE, STATE, EXACT, CHAIN = SnapshotKind
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


# Where to take snapshots


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("hello you", 6),  # parts inside an edge
        ("hello world peace", None),  # continues a path
        ("hello wor", None),  # is all known
        ("other", None),  # shares nothing
    ],
)
def test_a_junction_with_stored_paths(tokens, expected):
    """
    A junction is where a prompt parts from a path, not where it continues one.
    """
    cache = make_cache(EXACT)
    store(cache, "hello world")

    assert cache.junction("model", toks(tokens)) == expected


@pytest.mark.parametrize(
    ("interval", "marked", "expected"),
    [
        (0, [], {8}),
        (4, [], {4, 8}),
        (3, [], {3, 6, 8}),
        (0, [9, 3, 7, 3], {3, 7, 8}),
        (0, [-1, 99], {8}),
    ],
)
def test_snapshot_points_of_ten_tokens(interval, marked, expected):
    """
    Points are distinct and leave tokens to compute.
    """
    assert snapshot_points(10, interval, marked) == expected


def test_points_are_spaced():
    """
    The first of two that are too near stays.
    """
    assert spaced([3, 9, 10, 12, 5], 2, 2) == [5, 9, 12]


def test_one_token_has_no_snapshot_point():
    """
    A prompt of one token can restore nothing.
    """
    assert snapshot_points(1, 1, ()) == set()


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
