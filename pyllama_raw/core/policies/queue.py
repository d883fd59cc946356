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
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Literal

from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.waiting import WaitingQueue

N_FIRST = 32  # keys asked for again in each step: those of the first ones
N_TURN = 32  # and of so many others in turn

Numbers = tuple[float, ...]
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
        self._unasked: dict[int, Sequence] = {}  # by request_id; of no key yet
        self._keys: dict[int, Numbers] = {}  # by request_id
        self._order: list[tuple[Numbers, Rank, Sequence]] = []  # those with a key
        self._clients: dict[str | None, list[tuple[Rank, Sequence]]] = {}
        self._turn = 0  # index in the order of who is asked for next in turn

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
        key = self._keys.pop(request_id, None)
        if key is not None:
            del self._order[bisect_left(self._order, (key, sequence.rank))]

    def _insert(self, key: Numbers, sequence: Sequence) -> None:
        self._keys[sequence.request.request_id] = key
        insort(self._order, (key, sequence.rank, sequence))

    # -- who is next -------------------------------------------------------------

    def candidates(self, ask: Ask) -> Iterator[Sequence]:
        """
        Who is to be admitted, the best first; who was is not here when the next is asked for.

        If the policy fails, the others follow by rank.
        """
        asked = self._ask_new(ask) and (not self._changes or self._ask_again(ask))
        index, overdue = 0, None
        while asked and self._items:
            first = self.head
            if first is not overdue and first.n_overtaken >= self._max_overtakes:
                overdue = first
                yield first
            elif index == len(self._order):
                return
            else:
                sequence = self._order[index][2]
                yield sequence
                index += sequence.request.request_id in self._keys
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
        for request_id, sequence in list(self._unasked.items()):
            key = ask(sequence)
            if key is None:
                return False
            del self._unasked[request_id]
            self._insert(key, sequence)
        return True

    def _ask_again(self, ask: Ask) -> bool:
        """Give the first ones and some others their keys of now; False if that failed."""
        start, self._turn = self._turn, self._turn + N_TURN
        if self._turn >= len(self._order):
            self._turn = 0
        first, others = self._order[:N_FIRST], self._order[start : start + N_TURN]
        for known, _, sequence in {id(item): item for item in first + others}.values():
            if known:  # else it was preempted
                key = ask(sequence)
                if key is None:
                    return False
                if key != known:
                    self._forget_key(sequence)
                    self._insert(key, sequence)
        return True

    def check_integrity(self) -> None:
        """Whoever waits has a key, will be asked for one, or is behind its client's first."""
        super().check_integrity()
        assert self._order == sorted(self._order, key=lambda item: item[:2])
        assert len(self._order) == len(self._keys)
        assert not self._unasked.keys() & self._keys.keys()
        known = [*self._unasked.values(), *(item[2] for item in self._order)]
        known += [s for mine in self._clients.values() for _, s in mine[1:]]
        assert {id(s) for s in known} == {id(s) for s in self}
        assert len(known) == len(self)
