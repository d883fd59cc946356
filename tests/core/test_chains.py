"""Chains: points of a path that share the positions before them."""

import pytest

from pyllama_raw.core.memory.snapshots import SnapshotKind
from tests.core.cache_support import find, make_cache, spans, store, toks
from tests.core.reuse_support import Engine

CHAIN, EXACT = SnapshotKind.CHAIN, SnapshotKind.EXACT


@pytest.fixture
def cache():
    """Two points on one path, and one where another prompt parts from it between them."""
    cache = make_cache(CHAIN)
    for text in ("abcd", "abcdefgh", "abcdex"):
        store(cache, text)
    return cache


def test_a_point_is_restored_with_those_it_goes_on_from(cache):
    """
    A path that parts between two points goes on from the earlier one.
    """
    found = [spans(find(cache, text)) for text in ("abcdefghi", "abcdexy", "abcdefg")]

    first = ("abcd", 0, 4)
    assert found == [
        [first, ("abcdefgh", 4, 8)],
        [first, ("abcdex", 4, 6)],
        [first],
    ]


def test_a_point_between_others_is_not_needed_by_those_behind_it(cache):
    """
    Those were captured without it, so all but what a restore uses may go.
    """
    store(cache, "abcde")
    hit = find(cache, "abcdefghi")
    cache.pin(hit)

    plan = cache.plan_store("model", toks("zz"), 2)
    n_free = cache.max_bytes - sum(entry.n_charged for entry in hit.entries)
    reservation = cache.reserve(plan, n_free - 4 * plan.stop)

    assert spans(hit) == [("abcd", 0, 4), ("abcdefgh", 4, 8)]
    assert reservation is not None
    assert cache.take_released() == ["abcdex", "abcde"]
    cache.check_integrity()


def test_what_goes_on_from_a_point_falls_with_it(cache):
    """
    A restore that failed takes what cannot be restored without it.
    """
    store(cache, "z")

    cache.drop(find(cache, "abcde").entries[0])

    assert sorted(cache.take_released()) == ["abcd", "abcdefgh", "abcdex"]
    assert spans(find(cache, "zz")) == [("z", 0, 1)]
    cache.check_integrity()


def n_points(kind: SnapshotKind) -> tuple[int, int]:
    """The points that a limit holds of prompts of 400 tokens, and tokens reused of the last."""
    engine = Engine(1, kind=kind, interval=20, max_bytes=30_000, n_ctx_slot=512)
    prompts = [[*range(k * 1000, k * 1000 + 400)] for k in range(1, 7)]
    for prompt in prompts:
        engine.run(prompt)
    [end] = engine.run([*prompts[-1][:390], 5, 6])
    return engine.cache.n_entries, end.n_cached


def test_a_limit_holds_many_points():
    """
    At least four times those that whole states leave room for, and as much is reused.
    """
    (n_chained, n_reused), (n_whole, n_reused_whole) = map(n_points, (CHAIN, EXACT))

    assert n_chained >= 4 * n_whole
    assert n_reused >= n_reused_whole > 0
