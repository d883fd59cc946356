"""
Whose turn it is: lots take turns, a step each.

It is deficit round-robin whose quantum is n_batch, the most tokens that a step can hold: no
lot ever owes any, so a turn is one step. Lots that have just come are before the one that was
served last, so of k lots with work each gets every k-th step: none waits for more than
(k - 1) * n_batch tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import NamedTuple

from pyllama_raw.core.request import Lot
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.spans import Span, span_at


class Group(NamedTuple):
    """Those of a lot who can be computed, by slot."""

    streams: list[Running]  # that go on by one token
    prompts: list[Running]


Groups = dict[Lot, Group]


def by_lot(streams: Items[Running], prompts: Items[Running]) -> Groups:
    """Those who may share a decode; rows of spans never share one with tokens."""
    groups: Groups = {}
    for running in streams:
        groups.setdefault(running.request.lot, Group([], [])).streams.append(running)
    for running in prompts:
        groups.setdefault(_lot_of(running), Group([], [])).prompts.append(running)
    return groups


class LotTurns:
    """Remembers whose turn it is between steps."""

    def __init__(self) -> None:
        self._waiting: list[Lot] = []  # in the order of their turns
        self._served: Lot | None = None  # the last one

    def pick(self, ready: Collection[Lot]) -> Lot:
        """The next of *ready*, which is not empty; who is not in it loses its turn."""
        if len(ready) == 1:
            (self._served,) = ready
            self._waiting.clear()
            return self._served
        served = [lot for lot in ready if lot == self._served]
        waiting = [lot for lot in self._waiting if lot in ready]
        new = [lot for lot in ready if lot not in (*waiting, *served)]
        waiting += [*new, *served]
        self._served, *self._waiting = waiting
        return self._served

    def repeat(self) -> Lot:
        """The last step was not computed: its lot, which is returned, goes first again."""
        lot, self._served = self._served, None
        assert lot is not None
        self._waiting.insert(0, lot)
        return lot

    def restart(self) -> None:
        """As if there had been no step."""
        self._waiting.clear()
        self._served = None


def _lot_of(running: Running) -> Lot:
    """That of the next rows of a prompt."""
    lot = running.request.lot
    span = next_span(running)
    if span is None:
        return lot
    is_whole = not span.is_causal
    return Lot(f"{lot.name}: rows", lot.is_single or is_whole, is_whole)


def next_span(running: Running) -> Span | None:
    """The one that *running* is to compute rows of; None: text comes next."""
    spans = running.request.spans
    number = span_at(spans, running.n_computed)
    return None if number is None else spans[number]


def n_least(running: Running) -> int:
    """The fewest rows that a prompt can compute in a step."""
    span = next_span(running)
    return 1 if span is None or span.is_causal else span.stop - span.start
