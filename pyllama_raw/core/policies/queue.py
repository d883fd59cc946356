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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from heapq import heappop, heappush
from typing import Literal

from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.waiting import WaitingQueue

N_FIRST = 16  # keys asked for again in each step: those of the first ones
N_TURN = 8  # and of so many others in turn

Numbers = tuple[float, ...]
Ask = Callable[[Sequence], Numbers | None]  # None: the policy failed
Rank = tuple[int, int]
Item = tuple[Numbers, Rank, Sequence]


class PolicyQueue(WaitingQueue):
    """Sequences that hold no slot, with keys."""

    def __init__(
        self, keys: Literal["fixed", "changing", "by_client"], max_overtakes: int
    ) -> None:
        super().__init__()
        self._changes = keys != "fixed"
        self._by_client = keys == "by_client"
        self._max_overtakes = max_overtakes
        self._unasked: dict[int, Sequence] = {}  # by request_id; of no key yet
        self._asked: dict[int, Item] = {}  # by request_id
        self._heap: list[Item] = []  # of these, and some that are not valid any more
        self._passed: list[Item] = []  # taken out of the heap, and not admitted
        self._ring = OrderedDict[int, None]()  # request_ids, by whose turn it is
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
                self._unasked[sequence.request.request_id] = sequence
                if len(mine) > 1:
                    self._forget_key(mine[1][1])
        else:
            self._unasked[sequence.request.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._forget(sequence)

    def discard(self, sequences: Items[Sequence]) -> None:
        gone = set(map(id, sequences))
        for sequence in [sequence for sequence in self if id(sequence) in gone]:
            self.remove(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._forget_key(sequence)
        mine = self._clients.get(sequence.request.client, [])
        index = bisect_left(mine, (sequence.rank,))
        if index == len(mine) or mine[index][1] is not sequence:
            return  # the order has no clients, or it was preempted
        del mine[index]
        if not mine:
            del self._clients[sequence.request.client]
        elif index == 0:
            first = mine[0][1]
            self._unasked[first.request.request_id] = first

    def _forget_key(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self._unasked.pop(request_id, None)
        self._asked.pop(request_id, None)  # the heap is told when it comes up

    def _insert(self, key: Numbers, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        if self._changes:
            self._ring.setdefault(request_id)
        item = self._asked[request_id] = (key, sequence.rank, sequence)
        heappush(self._heap, item)

    def _is_valid(self, item: Item) -> bool:
        return self._asked.get(item[2].request.request_id) is item

    def _pop(self) -> Item | None:
        """The smallest of those that are valid, which is out of the heap then."""
        while self._heap:
            item = heappop(self._heap)
            if self._is_valid(item):
                return item
        return None

    def _put_back(self) -> None:
        for item in filter(self._is_valid, self._passed):
            heappush(self._heap, item)
        self._passed.clear()
        if len(self._heap) > 2 * len(self._asked) + N_FIRST:
            self._heap = sorted(self._asked.values(), key=lambda item: item[:2])

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
        new, self._unasked = self._unasked, {}  # one that has been large stays slow
        for request_id, sequence in list(new.items()):
            key = ask(sequence)
            if key is None:
                self._unasked = new
                return False
            del new[request_id]
            self._insert(key, sequence)
        return True

    def _ask_again(self, ask: Ask) -> bool:
        """Give the first ones and some others their keys of now; False if that failed."""
        for _ in range(N_FIRST):
            if (item := self._pop()) is not None:
                self._passed.append(item)
        again = {item[2].request.request_id: item for item in self._passed}
        for _ in range(min(N_TURN, len(self._ring))):
            request_id, _ = self._ring.popitem(last=False)
            if request_id in self._asked:
                self._ring[request_id] = None
                again[request_id] = self._asked[request_id]
        works = all(self._ask_one_again(ask, item) for item in again.values())
        self._put_back()
        return works

    def _ask_one_again(self, ask: Ask, item: Item) -> bool:
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
        valid = [*filter(self._is_valid, [*self._heap, *self._passed])]
        assert {id(item) for item in valid} == {id(i) for i in self._asked.values()}
        assert not self._unasked.keys() & self._asked.keys()
        known = [*self._unasked.values(), *(item[2] for item in self._asked.values())]
        known += [s for mine in self._clients.values() for _, s in mine[1:]]
        assert {id(s) for s in known} == {id(s) for s in self}
        assert len(known) == len(self)
        assert not self._changes or self._asked.keys() <= self._ring.keys()
