"""
The waiting queue of a policy.

It is sorted by rank, which is the order of `fcfs`, and by the keys of the policy besides.
Rank decides wherever the policy does not: among equal keys, and while the policy fails.

Rules:
1. A preempted one goes before all keys, because it would otherwise be preempted for those
   it waits for.
2. The first by rank goes next after `max_overtakes` others. So one with r others before
   it by rank waits for (r + 1) * (max_overtakes + 1) admissions at most, whatever the keys.
3. A step asks for a bounded number of keys again, so a long queue does not slow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, nsmallest
from typing import Literal

from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.waiting import WaitingQueue

N_FIRST = 16  # keys asked for again in each step: those of the first ones
N_TURN = 8  # and of so many others in turn

Numbers = tuple[float, ...]
Ask = Callable[[Sequence], Numbers | None]  # None: the policy failed


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
        asked, overdue = self._renew(self._due()), None
        keys = self._keys
        heap = [(keys[each], rank, each) for rank, each in self._items if each in keys]
        heapify(heap)
        while asked and self._items:
            first = self.head
            if first is not overdue and first.n_overtaken >= self._max_overtakes:
                chosen = overdue = first
            elif heap:
                chosen = heappop(heap)[2]
            else:
                return
            if chosen in self._keys:  # else it was overdue, and admitted
                yield chosen
                if self._by_client and chosen not in self._keys:
                    new = self._new()
                    asked = self._renew(new)
                    for each in new if asked else ():
                        heappush(heap, (self._keys[each], each.rank, each))
        if not asked:
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
        for each in sequences:
            key = () if each.n_preempted else self._ask(each)
            if key is None:
                return False
            self._keys.pop(each, None)
            self._keys[each] = key
        return True

    def _due(self) -> Iterable[Sequence]:
        """Sequences that are new, and some others if keys change: the first ones, and in turn."""
        due = self._new()
        if self._changes:
            known = [each for each, key in self._keys.items() if key]
            due += nsmallest(N_FIRST, known, lambda s: (self._keys[s], s.rank))
            due += known[:N_TURN]
        return dict.fromkeys(due)

    def _new(self) -> list[Sequence]:
        """Sequences that want a key and have none; takes the keys of others away."""
        wanted = self._wanted()
        for each in self._keys.keys() - wanted.keys():
            del self._keys[each]
        return [each for each in wanted if each not in self._keys]

    def _wanted(self) -> dict[Sequence, None]:
        """Sequences that need a key: all, or the first of each client and the preempted ones."""
        if not self._by_client:
            return dict.fromkeys(self)
        firsts: dict[str | None, Sequence] = {}
        for each in self:
            if not each.n_preempted:
                firsts.setdefault(each.request.client, each)
        preempted = [each for each in self if each.n_preempted]
        return dict.fromkeys([*preempted, *firsts.values()])

    def check_integrity(self) -> None:
        """Only sequences that wait have keys; those of the preempted ones are empty."""
        super().check_integrity()
        assert self._keys.keys() <= set(self)
        assert all(bool(key) != bool(s.n_preempted) for s, key in self._keys.items())
