"""
Which texts a step computes.

1. A step has texts of one lot; lots take turns.
2. Requests take turns, a text each. Who was served goes behind all others, so of k requests
   each is served at least once in k steps, however many texts the others have.
3. A text that does not fit beside the others waits. The first one of a step always fits: it
   is cut if it may be, and otherwise takes as many tokens as it has.
4. A text that was cut goes on first, in the slot 0, and its lot with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from pyllama_raw.core.embedding.progress import Progress
from pyllama_raw.core.lots import Turns
from pyllama_raw.core.request import Lot
from pyllama_raw.core.step import Encode, StepPlan


class TextPacker:
    """Fills steps; remembers whose turn it is."""

    def __init__(self) -> None:
        self._queue: list[Progress] = []  # whose turn comes first
        self._lots = Turns[Lot]()
        self._cut: Progress | None = None  # who has a part of a text computed

    def add(self, progress: Progress) -> None:
        self._queue.append(progress)
        self._queue.sort(key=lambda one: one.request.priority)  # keeps equal ones

    def remove(self, progress: Progress) -> None:
        self._queue.remove(progress)
        if progress is self._cut:
            self._cut = None

    def pack(self, n_tokens: int, n_texts: int) -> StepPlan:
        """At most *n_tokens*, except for a single text, and at most *n_texts*."""
        if not self._queue:
            return StepPlan()
        if self._cut is not None:
            lot = self._cut.request.lot
        else:
            lot = self._lots.pick({one.request.lot: None for one in self._queue})
        queue = [one for one in self._queue if one.request.lot == lot]
        if self._cut is not None:
            queue.remove(self._cut)
            queue.insert(0, self._cut)
        return StepPlan(works=tuple(_fill(queue, n_tokens, n_texts)), lot=lot)

    def served(self, served: Collection[Progress]) -> None:
        """They were in a step that was computed, and go behind those who were not."""
        self._cut = next((one for one in served if one.start), None)
        self._queue.sort(key=lambda one: (one.request.priority, one in served))

    def restart(self) -> None:
        """What was computed of texts in parts is lost."""
        if self._cut is not None:
            self._cut.start = 0
            self._cut = None


def _fill(queue: list[Progress], n_tokens: int, n_texts: int) -> list[Encode]:
    works: list[Encode] = []
    n_ahead = 0  # texts of each who still takes part
    while queue:
        fitting = []
        for one in queue:
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
        queue = fitting
        n_ahead += 1
    return works


def _encode(
    one: Progress, n_ahead: int, slot: int, start: int, tokens: array[int]
) -> Encode:
    request = one.request
    n_text = len(request.text(one.n_done + n_ahead))
    is_last = start + len(tokens) == n_text
    return Encode(request.request_id, slot, start, tokens, is_last)
