"""
Cost of the prefix cache itself: no model, no bytes copied.

Run: python -m pytest benchmarks/micro -q (tests/ does not collect it).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import chain, count, repeat

import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind

N_PROMPT = 2000
N_ENTRIES = 100_000
N_SNAPSHOT = 1_000_000  # bytes, as reserved; nothing is copied

kinds = pytest.mark.parametrize("kind", SnapshotKind, ids=lambda kind: kind.value)


def prompts(seed: int) -> Iterator[array[int]]:
    """Endless prompts: one of 50 system prompts, one of 40 topics, 120 own tokens."""
    rng = random.Random(seed)  # noqa: S311
    while True:
        system, topic = rng.randrange(50), rng.randrange(40)
        yield array(
            "i",
            chain(
                repeat(system, 1000),
                repeat(100 + topic, 880),
                array("i", rng.randbytes(480)),
            ),
        )


def store(cache: PrefixCache, tokens: array[int], n_tokens: int = N_PROMPT) -> None:
    """Capture the start of a prompt, as far as decisions go."""
    plan = cache.plan_store("model", tokens, n_tokens)
    if plan is None:
        return
    reservation = cache.reserve(plan, N_SNAPSHOT)
    assert reservation is not None
    cache.commit(reservation, None, N_SNAPSHOT)


def full_cache(kind: SnapshotKind, n_entries: int) -> PrefixCache:
    """A cache that has to evict one entry for each it stores."""
    cache = PrefixCache(kind, max_bytes=2**60, max_entries=n_entries)
    source = prompts(1)
    while cache.stats().n_entries < n_entries:
        store(cache, next(source))
        cache.take_released()
    return cache


@pytest.fixture(scope="module")
def caches() -> dict[tuple[SnapshotKind, int], PrefixCache]:
    return {}


def cached(caches, kind: SnapshotKind, n: int = N_ENTRIES):
    key = (kind, n)
    if key not in caches:
        caches[key] = full_cache(*key)
    return caches[key]


@pytest.mark.benchmark(group="match a prompt of 2,000 tokens")
@pytest.mark.parametrize("n_entries", [1000, N_ENTRIES])
@kinds
def test_match(benchmark, caches, kind, n_entries):
    """One match(), prefix of 1,880 tokens known. Nothing else is timed."""
    cache = cached(caches, kind, n=n_entries)
    source = prompts(1)
    wanted = [next(source) for _ in range(500)]
    turn = count()
    benchmark.extra_info["n_entries"] = n_entries

    benchmark(lambda: cache.match("model", wanted[next(turn) % 500], N_PROMPT - 1))


@pytest.mark.benchmark(group="match along a path of 128 entries")
@pytest.mark.parametrize("kind", [SnapshotKind.RANGE, SnapshotKind.EXACT])
def test_match_long_chain(benchmark, kind):
    """One match() of a prompt of 16,384 tokens with an entry each 128 tokens."""
    cache = PrefixCache(kind, max_bytes=2**60, max_entries=1000)
    tokens = array("i", range(16_384))
    for n_tokens in range(128, 16_384, 128):
        store(cache, tokens, n_tokens)

    benchmark(lambda: cache.match("model", tokens, 16_383))


@pytest.mark.benchmark(group="store a prompt of 2,000 tokens, evicting one")
@kinds
def test_store(benchmark, caches, kind):
    """plan_store(), reserve() with one eviction, commit(), take_released()."""
    bench_store(benchmark, cached(caches, kind), n_hits=0)


@pytest.mark.benchmark(group="store as above after 4 recorded hits")
@kinds
def test_store_after_hits(benchmark, caches, kind):
    """Hits move the order of eviction; the queue sorts that out when it evicts."""
    bench_store(benchmark, cached(caches, kind), n_hits=4)


def bench_store(benchmark, cache: PrefixCache, n_hits: int) -> None:
    new, known, turn = prompts(turns := next(seeds)), prompts(1), count()
    stored = [next(new) for _ in range(3000)]
    asked = [next(known) for _ in range(3000)]
    benchmark.extra_info.update(seed=turns, n_entries=cache.stats().n_entries)

    def step() -> None:
        n = next(turn)
        for i in range(n_hits):
            tokens = asked[(n * n_hits + i) % len(asked)]
            cache.record(cache.match("model", tokens, N_PROMPT - 1))
        store(cache, stored[n])
        cache.take_released()

    benchmark.pedantic(step, rounds=len(stored))


seeds = count(2)  # a new one each benchmark: what is stored must be new
