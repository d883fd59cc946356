"""The waiting queue: by priority, then arrival, bounded in requests and tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from pyllama_raw.core.sequence import Sequence
from pyllama_raw.errors import QueueFull


class WaitingQueue:
    """
    Sequences that hold no slot, best rank first.

    A sorted list: insertion moves pointers only, and the order can be read in place.
    Preempted sequences come back by push(), which no limit refuses.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.n_tokens = 0
        self._items: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._items)

    def first(self, n: int) -> list[Sequence]:
        """The best *n*, safe to remove from while reading."""
        return [sequence for _, sequence in self._items[:n]]

    def check_room(self, n_tokens: int, n_requests: int = 1) -> None:
        """Raise QueueFull if *n_requests* of *n_tokens* in all are over a limit."""
        n_waiting = len(self._items) + n_requests
        if n_waiting > self.max_waiting:
            raise QueueFull("max_waiting", n_waiting, self.max_waiting)
        total = self.n_tokens + n_tokens
        if total > self.max_waiting_tokens:
            raise QueueFull("max_waiting_tokens", total, self.max_waiting_tokens)

    def push(self, sequence: Sequence) -> None:
        insort(self._items, (sequence.rank, sequence))
        self.n_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, (sequence.rank,))
        assert self._items[index][1] is sequence
        del self._items[index]
        self.n_tokens -= len(sequence.tokens)

    def check_integrity(self) -> None:
        """Sorted, without a slot, and the tokens add up."""
        ranks = [rank for rank, _ in self._items]
        assert ranks == sorted(ranks)
        assert all(s.slot is None and s.n_computed == 0 for s in self)
        assert self.n_tokens == sum(len(s.tokens) for s in self)
