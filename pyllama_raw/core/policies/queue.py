"""
The waiting queue of a policy.

It is sorted by rank, which is the order of `fcfs`, and by the keys of the policy besides.
Rank decides wherever the policy does not: among equal keys, and while the policy fails.

Rules:
1. Who was preempted goes before all keys, because it would otherwise be preempted for those
   it waits for.
2. The first by rank goes next after `max_overtakes` others. So whoever has r others before
   it by rank waits for (r + 1) * (max_overtakes + 1) admissions at most, whatever the keys.
3. A step asks for a bounded number of keys again, so a long queue does not slow it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from heapq import heappop, heappush
from typing import Literal

from pyllama_raw.core.sequence import QueueItem, Sequence
from pyllama_raw.core.waiting import WaitingQueue

N_FIRST = 16  # keys asked for again in each step: those of the first ones
N_TURN = 8  # and of so many others in turn

Numbers = tuple[float, ...]
NO_KEY: Numbers = (float("inf"),)  # of what has not been asked for yet
Ask = Callable[[Sequence], Numbers | None]  # None: the policy failed
Rank = tuple[int, int]


class PolicyQueue(WaitingQueue):
    """Sequences that hold no slot, with keys."""

    def __init__(
        self, keys: Literal["fixed", "changing", "by_client"], max_overtakes: int
    ) -> None:
        super().__init__()
        self._changes = keys != "fixed"
        self._by_client = keys == "by_client"
        self._max_overtakes = max_overtakes
        # An item counts as long as its sequence has it.
        self._unasked: list[QueueItem] = []  # of no key yet
        self._heap: list[QueueItem] = []
        self._passed: list[QueueItem] = []  # taken out of the heap, and not admitted
        self._ring = deque[Sequence]()  # by whose turn it is; some have left
        self._clients: dict[str | None, list[tuple[Rank, Sequence]]] = {}

    # -- who is in it ------------------------------------------------------------

    def push(self, sequence: Sequence) -> None:
        super().push(sequence)
        if sequence.n_preempted:
            self._insert((), sequence)
        elif self._by_client:
            mine = self._clients.setdefault(sequence.request.client, [])
            insort(mine, (sequence.rank, sequence))
            if mine[0][1] is sequence:
                self._await_key(sequence)
                if len(mine) > 1:
                    mine[1][1].item = None
        else:
            self._await_key(sequence)

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._forget(sequence)

    def discard(self, sequences: Items[Sequence]) -> None:
        gone = set(map(id, sequences))
        for sequence in [sequence for sequence in self if id(sequence) in gone]:
            self.remove(sequence)

    def _forget(self, sequence: Sequence) -> None:
        sequence.item = None  # the heap is told when it comes up
        mine = self._clients.get(sequence.request.client, [])
        index = bisect_left(mine, (sequence.rank,))
        if index == len(mine) or mine[index][1] is not sequence:
            return  # the order has no clients, or it was preempted
        del mine[index]
        if not mine:
            del self._clients[sequence.request.client]
        elif index == 0:
            self._await_key(mine[0][1])

    @property
    def _max_items(self) -> int:
        """A list with more of them has too many that are not valid any more."""
        return 2 * len(self) + N_FIRST

    def _await_key(self, sequence: Sequence) -> None:
        if len(self._unasked) > self._max_items:
            self._unasked = [*filter(_is_valid, self._unasked)]
        sequence.item = (NO_KEY, sequence.rank, sequence)
        self._unasked.append(sequence.item)

    def _insert(self, key: Numbers, sequence: Sequence) -> None:
        sequence.item = (key, sequence.rank, sequence)
        heappush(self._heap, sequence.item)

    def _pop(self) -> QueueItem | None:
        """The smallest of those that are valid, which is out of the heap then."""
        while self._heap:
            item = heappop(self._heap)
            if _is_valid(item):
                return item
        return None

    def _put_back(self) -> None:
        for item in filter(_is_valid, self._passed):
            heappush(self._heap, item)
        self._passed.clear()
        if len(self._heap) > self._max_items:
            self._heap = sorted(
                filter(_is_valid, self._heap), key=lambda item: item[:2]
            )
        if len(self._ring) > self._max_items:
            self._ring = deque(each for each in dict.fromkeys(self._ring) if each.item)

    # -- who is next -------------------------------------------------------------

    def candidates(self, ask: Ask) -> Iterator[Sequence]:
        """
        Sequences to be admitted, the best first; one that was is gone when the next is asked for.

        If the policy fails, the others follow by rank.
        """
        self._put_back()
        asked = self._ask_new(ask) and (not self._changes or self._ask_again(ask))
        overdue = None
        while asked and self._items:
            first = self.head
            if first is not overdue and first.n_overtaken >= self._max_overtakes:
                overdue = first
                yield first
            elif (item := self._pop()) is None:
                return
            else:
                self._passed.append(item)
                yield item[2]
            asked = self._ask_new(ask)  # the next ones of clients
        yield from list(self)

    def note_overtaken(self, by: Sequence, blocked: Sequence | None) -> None:
        """*by* was admitted; the count of *blocked* is kept elsewhere."""
        if self._items:
            first = self.head
            if first is not blocked and first.rank < by.rank:
                first.n_overtaken += 1

    def _ask_new(self, ask: Ask) -> bool:
        """Give everybody a key; False if the policy failed."""
        new, self._unasked = self._unasked, []
        for number, item in enumerate(new):
            if not _is_valid(item):
                continue
            sequence = item[2]
            key = ask(sequence)
            if key is None:
                self._unasked = new[number:]
                return False
            self._insert(key, sequence)
            if self._changes:
                self._ring.append(sequence)
        return True

    def _ask_again(self, ask: Ask) -> bool:
        """Give the first ones and some others their keys of now; False if that failed."""
        for _ in range(N_FIRST):
            if (item := self._pop()) is not None:
                self._passed.append(item)
        again = {item[1]: item for item in self._passed}
        for _ in range(min(N_TURN, len(self._ring))):
            sequence = self._ring.popleft()
            if sequence.item is not None:
                self._ring.append(sequence)
                again[sequence.rank] = sequence.item
        works = all(self._ask_one_again(ask, item) for item in again.values())
        self._put_back()
        return works

    def _ask_one_again(self, ask: Ask, item: QueueItem) -> bool:
        known, _, sequence = item
        if not known:  # it was preempted
            return True
        key = ask(sequence)
        if key is None:
            return False
        if key != known:
            self._insert(key, sequence)
        return True

    def check_integrity(self) -> None:
        """A waiting sequence has a key, will be asked for one, or is behind its client's first."""
        super().check_integrity()
        asked = [*filter(_is_valid, [*self._heap, *self._passed])]
        unasked = [*filter(_is_valid, self._unasked)]
        assert all(item[0] is NO_KEY for item in unasked)
        assert not any(item[0] is NO_KEY for item in asked)
        behind = [s for mine in self._clients.values() for _, s in mine[1:]]
        assert not any(sequence.item for sequence in behind)
        known = [item[2] for item in (*asked, *unasked)] + behind
        assert {id(s) for s in known} == {id(s) for s in self}
        assert len(known) == len(self)
        turns = {id(sequence) for sequence in self._ring}
        assert not self._changes or all(id(i[2]) in turns for i in asked if i[0])


def _is_valid(item: QueueItem) -> bool:
    return item[2].item is item
