"""
Eviction: the least recently used entry goes first.

Rule: last_used of an entry only rises while the entry lives. So the queue holds each entry
once, with a number that may be too low, and looks again when it is about to leave:
O(log n) an entry, nothing on a hit.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from pyllama_raw.core.memory.cache_entry import Entry


class EvictionQueue:
    """Entries that may be evicted, and some that may not: those are sorted out late."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._clean_at = 64

    def push(self, entry: Entry) -> None:
        """Consider *entry* from now on; needed again after pop() has passed it over."""
        if entry.is_queued:
            return
        if len(self._heap) >= self._clean_at:
            self._clean()
        entry.is_queued = True
        heappush(self._heap, (entry.last_used, entry.entry_id, entry))

    def pop(self, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Take out the least recently used entry that may go."""
        while self._heap:
            last_used, entry_id, entry = self._heap[0]
            if entry.last_used > last_used and may_go(entry):
                heapreplace(self._heap, (entry.last_used, entry_id, entry))
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
