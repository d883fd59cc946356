"""
Turns of lots, which are those that may share a decode.

Lots that are computed with the same adapters take turns of a step. It is deficit
round-robin whose quantum is n_batch, the most tokens that a step can hold: no lot ever
owes any, so a turn is one step. Lots that have just come are before the one that was
served last, so of k lots with work each gets every k-th step: none waits for more than
(k - 1) * n_batch tokens.

Sets of adapters take turns in the same order. To go from one set to another costs time,
so a turn lasts until that is a SHARE of it at most, or until the set has nothing to
compute. A set that ended its turn early gets the rest in its next turn, which is at
most twice as long.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import Generic, NamedTuple, TypeVar

from pyllama_raw.core.request import AdapterSet, Lot
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.spans import Span, span_at

SHARE = 0.04  # of the time, for switches
SWITCH_S = 0.01  # to go from one set of adapters to another, until the cost is known

T = TypeVar("T")


class LotGroup(NamedTuple):
    """Sequences of a lot that can be computed, by slot."""

    streams: list[Running]  # that go on by one token
    prompts: list[Running]


Groups = dict[Lot, LotGroup]


def by_lot(streams: Items[Running], prompts: Items[Running]) -> Groups:
    """Groups that may share a decode; rows of spans never share one with tokens."""
    groups: Groups = {}
    for running in streams:
        groups.setdefault(running.request.lot, LotGroup([], [])).streams.append(running)
    for running in prompts:
        lot, span = running.request.lot, next_span(running)
        # Next are rows of an image or a sound, which share no decode with tokens.
        if span is not None:
            # Rows that see each other are computed at once, and alone.
            is_whole = not span.is_causal
            is_single = lot.is_single or is_whole
            lot = Lot(f"{lot.name}: rows", is_single, is_whole, lot.adapters)
        groups.setdefault(lot, LotGroup([], [])).prompts.append(running)
    return groups


def divided(groups: Groups) -> Groups:
    """
    Streams apart from prompts, which are computed one at a time: see core.exact.
    """
    divided: Groups = {}
    for (name, _, is_whole, adapters, _), (streams, prompts) in groups.items():
        if streams:
            lot = Lot(f"{name}: streams", adapters=adapters)
            divided[lot] = LotGroup(streams, [])
        if prompts:
            lot = Lot(f"{name}: one prompt", True, is_whole, adapters)
            divided[lot] = LotGroup([], prompts)
    return divided


class Turns(Generic[T]):
    """Round-robin over those that are ready, whatever comes and goes."""

    def __init__(self) -> None:
        self._waiting: list[T] = []  # in the order of their turns
        self._served: T | None = None  # the last one

    def pick(self, ready: Collection[T], *, stays: bool = False) -> T:
        """
        The next of *ready*, which is not empty; one that is not in it loses its turn.

        Args:
            stays: the one that was served last goes on, if it is ready.
        """
        # Those that have just come are between those that wait and the one served last.
        served = [item for item in ready if item == self._served]
        waiting = [item for item in self._waiting if item in ready]
        waiting += [item for item in ready if item not in (*waiting, *served)]
        waiting = [*served, *waiting] if stays else [*waiting, *served]
        self._served, *self._waiting = waiting
        return self._served

    def repeat(self) -> T:
        """The last step was not computed: its turn is the next again, and returned."""
        served, self._served = self._served, None
        assert served is not None
        self._waiting.insert(0, served)
        return served


class LotTurns:
    """Remembers whose turn it is between steps."""

    def __init__(self) -> None:
        self.switch_s = SWITCH_S
        self._sets = Turns[AdapterSet]()
        self._lots: dict[AdapterSet, Turns[Lot]] = {}
        self._last_set: AdapterSet = ()  # of the last step
        self._planned = 0.0  # when that was
        self._owed_s = 0.0  # how long this set goes on before another one's turn

    def pick(self, ready: Collection[Lot], now: float) -> Lot:
        """The next of *ready*, of which there are some; others lose their turns."""
        # The last step was the set's whose turn it is: its time is spent.
        self._owed_s = max(self._owed_s - (now - self._planned), 0.0)
        self._planned = now
        # First the set of adapters, which stays as long as its turn lasts.
        sets = dict.fromkeys([lot.adapters for lot in ready])
        adapters = self._sets.pick(sets, stays=self._owed_s > 0)
        # Another set begins its turn, with what it has left of its last one.
        if adapters != self._last_set:
            turn_s = self.switch_s / SHARE
            self._owed_s = min(self._owed_s + turn_s, 2 * turn_s)
            self._last_set = adapters
        # Sets that nothing is ready for are forgotten, or their number would grow.
        if adapters not in self._lots:
            turns = {key: lots for key, lots in self._lots.items() if key in sets}
            self._lots = turns | {adapters: Turns[Lot]()}
        # Then one of its lots, which take turns of a step.
        lots = [lot for lot in ready if lot.adapters == adapters]
        return self._lots[adapters].pick(lots)

    def repeat(self) -> Lot:
        """The last step was not computed: its lot is the next again, and returned."""
        return self._lots[self._sets.repeat()].repeat()

    def restart(self) -> None:
        """As if there had been no step: the context is new."""
        self._sets = Turns()
        self._lots.clear()
        self._last_set, self._owed_s = (), 0.0


def next_span(running: Running) -> Span | None:
    """The one that *running* is to compute rows of; None: text comes next."""
    spans = running.request.spans
    number = span_at(spans, running.n_computed)
    return None if number is None else spans[number]


def n_least(running: Running) -> int:
    """The fewest rows that a prompt can compute in a step."""
    span = next_span(running)
    return 1 if span is None or span.is_causal else span.stop - span.start
