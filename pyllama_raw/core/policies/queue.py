"""
The order in which sequences get slots, and the one in which they lose them.

`WaitingQueue` is sorted by rank: by priority, then arrival, which is the order of
`fcfs`. `PolicyQueue` is sorted by the keys of a policy besides. Rank decides wherever
the policy does not: among equal keys, and while the policy fails. `choose()` says which
sequence loses its slot, if one must and no policy says which.

Rules of a policy's queue:
1. A preempted one goes before all keys, because it would otherwise be preempted for
   those it waits for.
2. The first by rank goes next after `max_overtakes` others. So one with r others before
   it by rank waits for (r + 1) * (max_overtakes + 1) admissions at most, whatever the
   keys.
3. A step asks for a bounded number of keys again, so a long queue does not slow it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from heapq import heapify, heappop, heappush, nsmallest
from typing import Literal

from pyllama_raw.core.sequence import Running, Sequence

N_FIRST = 16  # keys asked for again in each step: those of the first ones
N_TURN = 8  # and of so many others in turn
MAX_PREEMPTED = 3  # after so many times, others are preempted first

Numbers = tuple[float, ...]
Ask = Callable[[Sequence], Numbers | None]  # None: the policy failed
Victim = Literal["latest", "largest", "smallest"]


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
        """
        Sequences to be admitted, the best first; those that were may be gone meanwhile.
        """
        return (sequence for _, sequence in tuple(self._items))

    def note_overtaken(self, by: Sequence, blocked: Sequence | None) -> None:
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


class PolicyQueue(WaitingQueue):
    """Sequences that hold no slot, with keys."""

    def __init__(
        self,
        keys: Literal["fixed", "changing", "by_client"],
        max_overtakes: int,
        ask: Ask,
    ) -> None:
        super().__init__()
        self._ask = ask
        self._changes = keys != "fixed"
        self._by_client = keys == "by_client"
        self._max_overtakes = max_overtakes
        # By the order in which they were asked for; empty: it was preempted.
        self._keys: dict[Sequence, Numbers] = {}

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._keys.pop(sequence, None)

    def candidates(self) -> Iterator[Sequence]:
        """Sequences by their keys; if the policy fails, the others follow by rank."""
        works, overdue = self._renew(self._due()), None  # whether the policy answers
        keys = self._keys
        heap = [(keys[s], rank, s) for rank, s in self._items if s in keys]
        heapify(heap)
        while works and self._items:
            # The head goes first once it was overtaken often enough, whatever its key is.
            first = self.head
            if first is not overdue and first.n_overtaken >= self._max_overtakes:
                candidate = overdue = first
            elif heap:
                candidate = heappop(heap)[2]
            else:
                return
            if candidate in self._keys:  # else it was overdue, and admitted
                yield candidate
                # It was admitted, so the next one of its client needs a key.
                if self._by_client and candidate not in self._keys:
                    new = self._new()
                    works = self._renew(new)
                    for sequence in new if works else ():
                        entry = self._keys[sequence], sequence.rank, sequence
                        heappush(heap, entry)
        if not works:
            yield from super().candidates()

    def note_overtaken(self, by: Sequence, blocked: Sequence | None) -> None:
        """The first one was passed, too."""
        super().note_overtaken(by, blocked)
        if self._items:
            first = self.head
            if first is not blocked and first.rank < by.rank:
                first.n_overtaken += 1

    def _renew(self, sequences: Iterable[Sequence]) -> bool:
        """Give *sequences* their keys of now; False if the policy failed."""
        for sequence in sequences:
            # One that was preempted goes before all others, so nobody is asked.
            key = () if sequence.n_preempted else self._ask(sequence)
            if key is None:
                return False
            # It goes behind all that were asked before.
            self._keys.pop(sequence, None)
            self._keys[sequence] = key
        return True

    def _due(self) -> Iterable[Sequence]:
        """
        Sequences that are new, and some others if keys change: the first ones, and in
        turn.
        """
        due = self._new()
        if self._changes:
            with_keys = [sequence for sequence, key in self._keys.items() if key]
            due += nsmallest(N_FIRST, with_keys, lambda s: (self._keys[s], s.rank))
            due += with_keys[:N_TURN]
        return dict.fromkeys(due)

    def _new(self) -> list[Sequence]:
        """Sequences that want a key and have none; takes the keys of others away."""
        sequences = self._eligible()
        for sequence in self._keys.keys() - sequences.keys():
            del self._keys[sequence]
        return [sequence for sequence in sequences if sequence not in self._keys]

    def _eligible(self) -> dict[Sequence, None]:
        """
        Sequences that need a key: all, or the first of each client and the preempted
        ones.
        """
        if not self._by_client:
            return dict.fromkeys(self)
        firsts: dict[str | None, Sequence] = {}
        for sequence in self:
            if not sequence.n_preempted:
                firsts.setdefault(sequence.request.client, sequence)
        preempted = [sequence for sequence in self if sequence.n_preempted]
        return dict.fromkeys([*preempted, *firsts.values()])

    def check_integrity(self) -> None:
        """Only sequences that wait have keys; those of the preempted ones are empty."""
        super().check_integrity()
        assert self._keys.keys() <= set(self)
        assert all(bool(key) != bool(s.n_preempted) for s, key in self._keys.items())


KEYS: Mapping[Victim, Callable[[Running], int]] = {
    "latest": lambda _: 0,
    "largest": lambda running: running.n_computed,
    "smallest": lambda running: -running.n_computed,
}


def choose(victim: Victim, running: Items[Running]) -> Running:
    """One of *running*: the one with the largest key, and of those the worst rank."""
    candidates = running
    # The worst rank gets better as others end. Sizes need not, so those that were
    # preempted often are spared.
    if victim != "latest":
        rare = [r for r in running if r.sequence.n_preempted < MAX_PREEMPTED]
        candidates = rare or running
    return max(candidates, key=lambda r: (KEYS[victim](r), r.sequence.rank))
