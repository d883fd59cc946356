"""
Steps of other work than streams: texts that become vectors, and sources that an encoder reads.

Rules of texts:
1. A step has texts of one lot; lots take turns.
2. Requests take turns, a text each. Those of the last step go behind all others, so of
   k requests each is served at least once in k steps, however many texts it has.
3. A text that does not fit beside the others waits. The first one of a step always
   fits: it is cut if it may be, and otherwise takes as many tokens as it has.
4. A text that was cut goes on first, in the slot 0, and its lot with it.
5. Nobody knows which text made a step fail, so each is then computed alone. One that is
   alone has a second try.

Rules of sources:
1. A decode sees the sources of the last such step only, so a step has those of all
   sequences that run. They fit together: no other sequence has a slot.
2. Sequences that have just come are read together, at once where nothing is decoded.
   Beside streams, reading takes half of the time at most, and every other step.
3. A step that failed leaves decodes with what they saw before, if the context is still
   there. Sequences that have just come are then read one at a time, and one that fails
   again ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from pyllama_raw.core.costs import CostHistory, StepBudget
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.request import SOURCES, Embedded, FinishReason, Lot
from pyllama_raw.core.scheduling.lots import Turns
from pyllama_raw.core.scheduling.roster import Roster
from pyllama_raw.core.sequence import Running, TextSequence
from pyllama_raw.core.step import (
    DecodeStatus,
    Encode,
    ReadSource,
    RowFailed,
    StepPlan,
    StepResult,
    Vector,
)
from pyllama_raw.errors import NoKVSpace

# A step of streams comes between two of texts.
STREAM_SHARE = 0.5  # of target_step_s


class Texts:
    """
    Plans steps of the texts in a roster, and takes in their results.

    Args:
        limits: n_slots texts and n_batch tokens a step, n_ctx_slot tokens a text.
        token_budget: of a step; None: what *target_step_s* allows.
    """

    def __init__(
        self,
        roster: Roster,
        limits: ContextLimits,
        token_budget: int | None,
        target_step_s: float,
    ) -> None:
        self._roster = roster
        self._max_texts = limits.n_slots
        self._costs = CostHistory()
        target_s = STREAM_SHARE * target_step_s
        self._budget = StepBudget(token_budget, target_s, limits.n_batch, self._costs)
        self._lots = Turns[Lot]()
        self._planned = 0.0
        self._n_alone = 0  # steps to come with a single text, after one that failed

    def plan(self, now: float) -> StepPlan:
        """The next step, while a request for vectors is there."""
        self._planned = now
        texts, cut = self._roster.texts, self._cut
        # A text that was cut goes on, because its part is in the context.
        if cut is not None:
            lot = cut.request.lot
        else:
            lot = self._lots.pick({text.request.lot: None for text in texts})
        ready = [text for text in texts if text.request.lot == lot]
        ready.sort(key=lambda text: text is not cut)
        n_texts = 1 if self._n_alone else self._max_texts
        works = _works(ready, self._budget.limit(0, 1, ()), n_texts)
        for work in works:
            sequence = self._roster.alive[work.request_id]
            if sequence.admitted is None:
                sequence.admitted = now
                self._roster.note("running", work.request_id, now)
        return StepPlan(works=tuple(works), lot=lot)

    @property
    def _cut(self) -> TextSequence | None:
        """The request of which a text is computed in part."""
        return next((text for text in self._roster.texts if text.start), None)

    def take(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in what came of *plan*."""
        self._n_alone = max(self._n_alone - 1, 0)
        counters = self._roster.counters
        match result.status:
            case DecodeStatus.OK:
                counters.computed_tokens += plan.n_tokens
                self._costs.observe(plan.n_tokens, 0, now - self._planned)
                self._take_outputs(plan, result, now)
            case DecodeStatus.ABORTED:
                counters.aborted_steps += 1
                self.restart()
            case _:
                counters.failed_steps += 1
                counters.rebuilds += result.status is DecodeStatus.FAILED
                self.restart()
                self._fail(plan, result, now)

    def restart(self) -> None:
        """Forget the text that is computed in part: the context has lost it."""
        cut = self._cut
        if cut is not None:
            cut.start = 0

    def _take_outputs(self, plan: StepPlan, result: StepResult, now: float) -> None:
        roster, served = self._roster, dict[TextSequence, None]()
        for work, output in zip(plan.works, result.outputs, strict=True):
            sequence = roster.alive.get(work.request_id)
            # Another of its texts has failed.
            if sequence is None:
                continue
            assert isinstance(sequence, TextSequence)
            served[sequence] = None
            if isinstance(output, Vector):
                index = sequence.complete()
                roster.events.append(Embedded(work.request_id, index, output.values))
                if sequence.is_done:
                    roster.finish(sequence, FinishReason.STOP, now)
            elif isinstance(output, RowFailed):
                roster.finish(sequence, output.error, now)
            else:
                sequence.start += len(work.tokens)
        # Requests of this step go behind those that were not in it.
        roster.texts.sort(key=lambda text: (text.request.priority, text in served))

    def _fail(self, plan: StepPlan, result: StepResult, now: float) -> None:
        sequence = self._roster.alive.get(plan.works[0].request_id)
        # Nobody knows which text it was: each is computed alone next.
        if len(plan.works) > 1:
            self._n_alone = len(plan.works)
        # Alone for the first time: most failures are of the moment.
        elif isinstance(sequence, TextSequence) and not sequence.has_failed:
            sequence.has_failed = True
            self._n_alone += 1
        else:
            assert result.error is not None
            self._roster.end(plan.works[0].request_id, result.error, now)


def _works(ready: Items[TextSequence], n_tokens: int, n_texts: int) -> list[Encode]:
    """
    Texts of *ready*, a text of each in turn.

    Args:
        n_tokens: of all; a single text may have more.
    """
    works: list[Encode] = []
    n_ahead = 0  # texts of each request that still takes part
    while ready:
        fitting = []
        for text in ready:
            tokens = text.tokens_of(n_ahead)
            # The request has no further text, or the step no place for it.
            if tokens is None or len(works) == n_texts:
                continue
            if len(tokens) > n_tokens and (works or text.request.may_cut):
                if works:
                    continue
                tokens = tokens[:n_tokens]
            start = 0 if n_ahead else text.start
            request = text.request
            n_text = len(request.text(text.n_done + n_ahead))
            is_last = start + len(tokens) == n_text
            slot = len(works)
            works.append(Encode(request.request_id, slot, start, tokens, is_last))
            n_tokens -= len(tokens)
            fitting.append(text)
        ready = fitting
        n_ahead += 1
    return works


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
