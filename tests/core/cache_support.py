"""Words for prefix cache tests: letters are tokens, payloads are names."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import Entry, Hit, SnapshotKind


def toks(text: str) -> array[int]:
    """One token a letter."""
    return array("i", map(ord, text))


def make_cache(
    kind: SnapshotKind,
    *,
    max_bytes: int = 1_000_000,
    max_entries: int = 1000,
) -> PrefixCache:
    return PrefixCache(kind, max_bytes=max_bytes, max_entries=max_entries)


def store(
    cache: PrefixCache,
    text: str,
    *,
    n_bytes: int = 100,
    namespace: Hashable = "model",
    payload: object = None,
) -> Entry | None:
    """Capture all of *text*, as a scheduler would; the payload is the text."""
    plan = cache.plan_store(namespace, toks(text), len(text))
    if plan is None or (reservation := cache.reserve(plan, n_bytes)) is None:
        return None
    return cache.commit(reservation, payload or text, n_bytes)


def find(cache: PrefixCache, text: str, *, namespace: Hashable = "model") -> Hit:
    """What a prompt *text* may restore."""
    return cache.match(namespace, toks(text), len(text) - 1)


def spans(hit: Hit) -> list[tuple[object, int, int]]:
    return [(span.entry.payload, span.start, span.stop) for span in hit.spans]


def held(cache: PrefixCache) -> int:
    return cache.stats().n_entries
