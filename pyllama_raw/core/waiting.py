"""The waiting queue: by priority, then arrival. `Admission` bounds it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Items

from pyllama_raw.core.sequence import Sequence


class WaitingQueue:
    """
    Sequences that hold no slot, best rank first.

    A sorted list: insertion moves pointers only, and the order can be read in place.
    """

    def __init__(self) -> None:
        self.n_tokens = 0
        self._items: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._items)

    @property
    def head(self) -> Sequence:
        """The first of those that wait."""
        return self._items[0][1]

    def candidates(self) -> Iterator[Sequence]:
        """Sequences to be admitted, the best first; those that were may be gone meanwhile."""
        return (sequence for _, sequence in tuple(self._items))

    def note_overtaken(self, by: Sequence, blocked: Sequence | None) -> None:  # noqa: ARG002
        """*by* was admitted, although *blocked* was before it."""
        if blocked is not None:
            blocked.n_overtaken += 1

    def push(self, sequence: Sequence) -> None:
        insort(self._items, (sequence.rank, sequence))
        self.n_tokens += sequence.n_known

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, (sequence.rank,))
        assert self._items[index][1] is sequence
        del self._items[index]
        self.n_tokens -= sequence.n_known

    def discard(self, sequences: Items[Sequence]) -> None:
        """Take out those of *sequences* that are here."""
        gone = set(map(id, sequences))
        self._items = [item for item in self._items if id(item[1]) not in gone]
        self.n_tokens = sum(sequence.n_known for sequence in self)

    def check_integrity(self) -> None:
        """Sorted, and the tokens add up."""
        ranks = [rank for rank, _ in self._items]
        assert ranks == sorted(ranks)
        assert self.n_tokens == sum(s.n_known for s in self)
