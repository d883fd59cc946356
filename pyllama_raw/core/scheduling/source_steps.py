"""
Steps in which an encoder reads sources, and what comes of them.

1. A decode sees the sources of the last such step only, so a step has those of all
   sequences that run. They fit together: no other sequence has a slot.
2. Sequences that have just come are read together, at once where nothing is decoded.
   Beside streams, reading takes half of the time at most, and every other step.
3. A step that failed leaves decodes with what they saw before, if the context is still
   there. Sequences that have just come are then read one at a time, and one that fails
   again ends.
"""

from __future__ import annotations

from pyllama_raw.core.request import SOURCES
from pyllama_raw.core.scheduling.roster import Roster
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.step import DecodeStatus, ReadSource, StepPlan, StepResult
from pyllama_raw.errors import NoKVSpace

NOTHING = StepPlan()


class SourceSteps:
    """Plans steps that read the sources of the roster, and takes in their results."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._planned = 0.0
        self._next_at = 0.0  # when streams have had as long as the last step took
        self._has_read = False  # nothing was decoded since
        self._one_by_one = False  # after a step that failed

    @property
    def waits(self) -> bool:
        """Whether a source is not read yet."""
        return not all(running.is_read for running in self._running)

    @property
    def _running(self) -> list[Running]:
        return list(self._roster.slots.running.values())

    def restart(self) -> None:
        """Decodes see no source any more: those of all that run are read again."""
        for running in self._running:
            running.is_read = False

    def plan(self, now: float) -> StepPlan:
        """The next step, without moves; a falsy one: it is the turn of others."""
        if not self.waits:
            return NOTHING
        readers = [running for running in self._running if running.is_read]
        # Streams have their step, and half of the time.
        if readers and (self._has_read or now < self._next_at):
            self._has_read = False
            return NOTHING
        new = [running for running in self._running if not running.is_read]
        # One of them made the last such step fail, and nobody knows which.
        if self._one_by_one:
            new = [min(new, key=lambda running: running.sequence.rank)]
        self._planned = now
        # What was read before is read again, because decodes see the last step only.
        together = sorted([*readers, *new], key=lambda running: running.slot)
        return StepPlan(works=tuple(map(_read, together)), lot=SOURCES)

    def take(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in what came of *plan*."""
        self._has_read, self._next_at = True, 2 * now - self._planned
        running = self._roster.slots.running
        ids = [work.request_id for work in plan.works if work.request_id in running]
        read = [running[request_id] for request_id in ids]
        counters = self._roster.counters
        match result.status:
            case DecodeStatus.OK:
                counters.computed_tokens += plan.n_tokens
                for reader in read:
                    reader.is_read = True
                self._one_by_one = self._one_by_one and self.waits
            case DecodeStatus.ABORTED:
                counters.aborted_steps += 1
            case _:
                counters.failed_steps += 1
                self._fail(
                    [reader for reader in read if not reader.is_read], result, now
                )

    def _fail(self, new: list[Running], result: StepResult, now: float) -> None:
        if result.status is DecodeStatus.FAILED:
            self._roster.counters.rebuilds += 1
            self._roster.memory.forget_slots()
        # It failed without other newcomers, so it is the cause.
        if self._one_by_one and new:
            error = result.error or NoKVSpace(
                "llama_encode", 1, "no room for the source"
            )
            self._roster.finish(new[0].sequence, error, now)
        self._one_by_one = True


def _read(running: Running) -> ReadSource:
    request, pos = running.request, running.n_computed
    assert request.source is not None
    return ReadSource(request.request_id, running.slot, pos, request.source)
