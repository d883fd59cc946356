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


class Group(NamedTuple):
    """Those of a lot who can be computed, by slot."""

    streams: list[Running]  # that go on by one token
    prompts: list[Running]


Groups = dict[Lot, Group]


def by_lot(streams: Items[Running], prompts: Items[Running]) -> Groups:
    """Those who may share a decode."""
    groups: Groups = {}
    for running in streams:
        groups.setdefault(running.request.lot, Group([], [])).streams.append(running)
    for running in prompts:
        groups.setdefault(running.request.lot, Group([], [])).prompts.append(running)
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
