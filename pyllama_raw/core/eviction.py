"""
Which entry goes first: an order key, and a queue that keeps the order.

Rule: the key of an entry only rises while the entry lives (by use and by time). So the
queue holds each entry once, with a key that may be too low, and looks again when it is
about to leave: O(log n) an entry, nothing on a hit.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from math import log2

from pyllama_raw.core.cache_entry import Entry

OrderKey = Callable[[Entry], tuple[float, ...]]  # the smallest is evicted first

ATTENTION_TOKENS = 4096  # context at which attention costs about as much as the weights
HALF_LIFE = 1000  # queries and stores after which an unused entry is worth half


def lru(entry: Entry) -> tuple[float, ...]:
    """Least recently used first."""
    return (entry.last_used,)


def lfu(entry: Entry) -> tuple[float, ...]:
    """Least often used first, then least recently."""
    return (entry.n_hits, entry.last_used)


def fifo(entry: Entry) -> tuple[float, ...]:
    """Oldest first, used or not."""
    return (entry.entry_id,)


def size_aware(entry: Entry) -> tuple[float, ...]:
    """Most bytes for each token saved first, then least recently used."""
    return (entry.n_tokens / entry.n_charged, entry.last_used)


def cost_aware(entry: Entry) -> tuple[float, ...]:
    """
    Least work saved for each byte first; the value halves while an entry is not used.

    value = uses * work / bytes / 2 ** (age / HALF_LIFE), of which this is the logarithm
    up to a term that is the same for all entries.
    """
    attention = 1 + (entry.start + entry.stop) / 2 / ATTENTION_TOKENS
    value = (1 + entry.n_hits) * entry.n_tokens * attention / entry.n_charged
    return (log2(value) + entry.last_used / HALF_LIFE,)


ORDER_KEYS: dict[str, OrderKey] = {
    key.__name__: key for key in (lru, lfu, fifo, size_aware, cost_aware)
}


class EvictionQueue:
    """Entries that may be evicted, and some that may not: those are sorted out late."""

    def __init__(self, order_key: OrderKey) -> None:
        self._order_key = order_key
        self._heap: list[tuple[tuple[float, ...], int, Entry]] = []
        self._clean_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: Entry) -> None:
        """Consider *entry* from now on; needed again after pop() has passed it over."""
        if entry.is_queued:
            return
        if len(self._heap) >= self._clean_at:
            self._clean()
        entry.is_queued = True
        heappush(self._heap, (self._order_key(entry), entry.entry_id, entry))

    def pop(self, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Take out the first entry in order that may go."""
        while self._heap:
            old_key, entry_id, entry = self._heap[0]
            key = self._order_key(entry)
            if key > old_key and may_go(entry):
                heapreplace(self._heap, (key, entry_id, entry))
            else:
                heappop(self._heap)
                entry.is_queued = False
                if may_go(entry):
                    return entry
        return None

    def _clean(self) -> None:
        """Let go of dropped entries, so that the heap never outgrows the cache for long."""
        self._heap = [item for item in self._heap if item[2].node is not None]
        heapify(self._heap)
        self._clean_at = 2 * len(self._heap) + 64
