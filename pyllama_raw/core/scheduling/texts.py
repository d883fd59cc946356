"""
Texts that become vectors, and which of them a step computes.

1. A step has texts of one lot; lots take turns.
2. Requests take turns, a text each. Those of the last step go behind all others, so of k
   requests each is served at least once in k steps, however many texts the others have.
3. A text that does not fit beside the others waits. The first one of a step always fits: it
   is cut if it may be, and otherwise takes as many tokens as it has.
4. A text that was cut goes on first, in the slot 0, and its lot with it.

A text has no memory once it is computed, so its request takes no slot and waits for none.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as Items

from pyllama_raw.core.lots import Turns
from pyllama_raw.core.request import EmbedRequest, Lot
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.step import Encode, StepPlan


class TextSequence(Sequence):
    """A request for vectors in progress: its texts are computed in their order."""

    __slots__ = ("has_failed", "n_done", "start")
    request: EmbedRequest

    def __init__(self, request: EmbedRequest, order: int, now: float) -> None:
        super().__init__(request, order, now)
        self.tokens = request.tokens  # no copy, because nothing follows them
        self.n_done = 0  # texts that have a vector
        self.start = 0  # tokens of the next one that are computed
        self.has_failed = False  # the next one has, alone

    @property
    def is_done(self) -> bool:
        """Whether every text has a vector."""
        return self.n_done == len(self.request.ends)

    def rest(self, n_ahead: int) -> array[int] | None:
        """The rest of the text after *n_ahead* others; None: there is no such text."""
        index = self.n_done + n_ahead
        if index == len(self.request.ends):
            return None
        return self.request.text(index)[0 if n_ahead else self.start :]

    def complete(self) -> int:
        """Note that the next text has its vector; returns the index of that text."""
        self.n_done += 1
        self.start = 0
        self.has_failed = False
        return self.n_done - 1


class Texts:
    """Requests for vectors that have not ended; remembers whose turn it is."""

    def __init__(self) -> None:
        self.all: list[TextSequence] = []  # in the order of their turns
        self._lots = Turns[Lot]()
        self._cut: TextSequence | None = None  # of which a part of a text is computed

    @property
    def n_running(self) -> int:
        """Requests that were in a step."""
        return sum([one.admitted is not None for one in self.all])

    @property
    def n_tokens(self) -> int:
        """Tokens of the requests that were in no step."""
        return sum([one.request.n_prompt for one in self.all if one.admitted is None])

    def push(self, sequence: TextSequence) -> None:
        """Add a request."""
        self.all.append(sequence)
        self.all.sort(key=lambda one: one.request.priority)  # keeps equal ones

    def remove(self, sequence: Sequence) -> None:
        """Take out a request, which is here."""
        self.all = [one for one in self.all if one is not sequence]
        if sequence is self._cut:
            self._cut = None

    def pack(self, n_tokens: int, n_texts: int) -> StepPlan:
        """
        Fill a step by *n_tokens*, except for a single text, and *n_texts* at most.

        There is a request.
        """
        if self._cut is not None:
            lot = self._cut.request.lot
        else:
            lot = self._lots.pick({one.request.lot: None for one in self.all})
        ready = [one for one in self.all if one.request.lot == lot]
        ready.sort(key=lambda one: one is not self._cut)
        return StepPlan(works=tuple(_fill(ready, n_tokens, n_texts)), lot=lot)

    def served(self, served: Collection[TextSequence]) -> None:
        """Let requests of a step that was computed go behind those that were not in it."""
        self._cut = next((one for one in self.all if one.start), None)
        self.all.sort(key=lambda one: (one.request.priority, one in served))

    def restart(self) -> None:
        """Forget the text that is computed in part: the context has lost it."""
        if self._cut is not None:
            self._cut.start = 0
            self._cut = None


def _fill(ready: Items[TextSequence], n_tokens: int, n_texts: int) -> list[Encode]:
    works: list[Encode] = []
    n_ahead = 0  # texts of each request that still takes part
    while ready:
        fitting = []
        for one in ready:
            rest = one.rest(n_ahead)
            if rest is None or len(works) == n_texts:
                continue
            if len(rest) > n_tokens and (works or one.request.may_cut):
                if works:
                    continue
                rest = rest[:n_tokens]
            start = 0 if n_ahead else one.start
            works.append(_encode(one, n_ahead, len(works), start, rest))
            n_tokens -= len(rest)
            fitting.append(one)
        ready = fitting
        n_ahead += 1
    return works


def _encode(
    one: TextSequence, n_ahead: int, slot: int, start: int, tokens: array[int]
) -> Encode:
    request = one.request
    n_text = len(request.text(one.n_done + n_ahead))
    is_last = start + len(tokens) == n_text
    return Encode(request.request_id, slot, start, tokens, is_last)
