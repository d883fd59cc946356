"""
Lots are those that may share a decode; they take turns. Suspects are computed apart.

Lots that are computed with the same adapters take turns of a step. It is deficit
round-robin whose quantum is n_batch, the most tokens that a step can hold: no lot ever
owes any, so a turn is one step. New lots come before the lot that was served last. So each of k
lots with work gets every k-th step: none waits for more than (k - 1) * n_batch tokens.

Sets of adapters take turns in the same order. To go from one set to another costs time,
so a turn lasts until that is a SHARE of it at most, or until the set has nothing to
compute. A set that ended its turn early gets the rest in its next turn, which is at
most twice as long.

libllama does not say which sequence made a batch fail, so they are computed again:
1. All together once more, since most failures are of the moment.
2. A sequence that takes part in a second failure is computed alone until it is past it.
3. A sequence that fails alone twice is the culprit, and ends. Others go on together.

A failure either brings somebody nearer to its end or comes after somebody got on, so
there is no endless loop. What fails only together is computed alone for longer each
time, so the number of failures grows with the logarithm of the tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from pyllama_raw.core.request import AdapterSet, Lot, Span, span_at
from pyllama_raw.core.sequence import Running, Sequence

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
    Streams apart from prompts, which are computed one at a time: see core/sequence.py.
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
        # Nearly always there is one.
        if len(ready) == 1:
            (self._served,), self._waiting = ready, []
            return self._served
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


N_TOGETHER = 1  # failures after which a sequence is computed with others again
N_ALONE = 2  # failures alone that end a request
MAX_STRETCH = 1024  # tokens computed alone, at most
STRETCH_FACTOR = 4


class Part(NamedTuple):
    """The part of a sequence in a batch that failed."""

    running: Running
    end: int  # tokens of it that would have been computed then


@dataclass(slots=True, eq=False)
class Suspect:
    sequence: Sequence
    n_failed: int = 0  # decodes it took part in, since it was cleared
    n_alone: int = 0  # of these, alone
    until: int = 0  # it is cleared with so many tokens computed
    until_output: int = 0  # or so many sampled

    @property
    def is_isolated(self) -> bool:
        return self.n_failed > N_TOGETHER

    def is_cleared(self, running: Running | None) -> bool:
        """Whether it has got past its failure; *running*: its sequence, if it is."""
        return self.sequence.n_output >= self.until_output or (
            running is not None and running.n_computed >= self.until
        )


class Suspects:
    """
    Sequences that took part in a failed decode and have not got past it yet.

    `all` is empty most of the time; every step looks at it.
    """

    def __init__(self) -> None:
        self.all: list[Suspect] = []
        self._stretch = 1  # tokens that the next isolated one computes alone

    def accuse(self, parts: Iterable[Part], *, alone: bool) -> Sequence | None:
        """
        Take in that the decode of *parts* failed; returns the culprit, if it is clear.

        Args:
            alone: nobody else was in the batch.
        """
        isolates = False
        for running, end in parts:
            sequence = running.sequence
            suspect = self._of(sequence)
            was_isolated = suspect.is_isolated
            suspect.n_failed += 1
            suspect.n_alone += alone
            # Alone twice: it is the culprit.
            if suspect.n_alone >= N_ALONE:
                self._release(suspect)
                return sequence
            # With one token more it is past the failure. One that is isolated from now
            # on goes further alone each time, because it may fail only together.
            n_more = 1
            if suspect.is_isolated and not was_isolated and not alone:
                isolates, n_more = True, self._stretch
            suspect.until = max(suspect.until, end + n_more - 1)
            suspect.until_output = max(suspect.until_output, sequence.n_output + n_more)
        if isolates:
            self._stretch = min(self._stretch * STRETCH_FACTOR, MAX_STRETCH)
        return None

    def _of(self, sequence: Sequence) -> Suspect:
        for suspect in self.all:
            if suspect.sequence is sequence:
                return suspect
        self.all.append(Suspect(sequence))
        return self.all[-1]

    def _release(self, culprit: Suspect) -> None:
        """Nobody is suspected any more for what the *culprit* did."""
        self.all.remove(culprit)
        # It was a request, not the context.
        self._stretch = 1
        for suspect in self.all:
            if not suspect.n_alone:
                suspect.n_failed = min(suspect.n_failed, N_TOGETHER)

    def clear(
        self, alive: Mapping[int, Sequence], running: Mapping[int, Running]
    ) -> None:
        """Forget sequences that have got past their failure, or have ended."""
        by_id = {suspect.sequence.request.request_id: suspect for suspect in self.all}
        self.all = [
            suspect
            for request_id, suspect in by_id.items()
            if request_id in alive and not suspect.is_cleared(running.get(request_id))
        ]

    def narrow(
        self, streams: list[Running], prompts: list[Running]
    ) -> tuple[list[Running], list[Running]]:
        """Keep only the first sequence that is to be computed alone, if any is."""
        alone = [suspect.sequence for suspect in self.all if suspect.is_isolated]
        isolated = [r for r in (*streams, *prompts) if r.sequence in alone]
        if not isolated:
            return streams, prompts
        # Others wait meanwhile, so a failure then has one suspect.
        first = min(isolated, key=lambda running: running.sequence.rank)
        return ([first], []) if first in streams else ([], [first])
