"""
Suspects: which sequences are computed together after a decode has failed.

libllama does not say which sequence made a batch fail, so they are computed again:
1. All together once more, since most failures are of the moment.
2. A sequence that takes part in a second failure is computed alone until it is past it.
3. A sequence that fails alone twice is the culprit, and ends. Others go on together.

A failure either brings somebody nearer to its end or comes after somebody got on, so
there is no endless loop. What fails only together is computed alone for longer each
time, so the number of failures grows with the logarithm of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pyllama_raw.core.sequence import Running, Sequence

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
