"""Steps of texts: how much they compute, and what comes of them."""

from __future__ import annotations

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.request import Embedded, FinishReason
from pyllama_raw.core.scheduling.budget import StepBudget
from pyllama_raw.core.scheduling.roster import Roster
from pyllama_raw.core.scheduling.texts import TextSequence
from pyllama_raw.core.speed import PrefillSpeed
from pyllama_raw.core.step import (
    DecodeStatus,
    RowFailed,
    StepPlan,
    StepResult,
    Vector,
)

# A step of streams comes between two of texts.
STREAM_SHARE = 0.5  # of target_step_s


class TextSteps:
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
        self._speed = PrefillSpeed()
        target_s = STREAM_SHARE * target_step_s
        self._budget = StepBudget(token_budget, target_s, limits.n_batch, self._speed)
        self._planned = 0.0
        self._n_alone = 0  # steps to come with a single text, after one that failed

    def plan(self, now: float) -> StepPlan:
        """The next step, while a request for vectors is there."""
        self._planned = now
        n_texts = 1 if self._n_alone else self._max_texts
        plan = self._roster.texts.pack(self._budget.limit(streams=True), n_texts)
        for work in plan.works:
            sequence = self._roster.alive[work.request_id]
            if sequence.admitted is None:
                sequence.admitted = now
                self._roster.note("running", work.request_id, now)
        return plan

    def take(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in what came of *plan*."""
        self._n_alone = max(self._n_alone - 1, 0)
        counters = self._roster.counters
        match result.status:
            case DecodeStatus.OK:
                counters.computed_tokens += plan.n_tokens
                self._speed.observe(plan.n_tokens, now - self._planned)
                self._take_outputs(plan, result, now)
            case DecodeStatus.ABORTED:
                counters.aborted_steps += 1
                self._roster.texts.restart()
            case _:
                counters.failed_steps += 1
                counters.rebuilds += result.status is DecodeStatus.FAILED
                self._roster.texts.restart()
                self._fail(plan, result, now)

    def _take_outputs(self, plan: StepPlan, result: StepResult, now: float) -> None:
        roster, served = self._roster, dict[TextSequence, None]()
        for work, output in zip(plan.works, result.outputs, strict=True):
            sequence = roster.alive.get(work.request_id)
            if sequence is None:
                continue  # another of its texts has failed
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
        roster.texts.served(served)

    def _fail(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Have each text computed alone: nobody knows the cause; a text that is has a second try."""
        sequence = self._roster.alive.get(plan.works[0].request_id)
        if len(plan.works) > 1:
            self._n_alone = len(plan.works)
        elif isinstance(sequence, TextSequence) and not sequence.has_failed:
            sequence.has_failed = True
            self._n_alone += 1
        else:
            assert result.error is not None
            self._roster.end(plan.works[0].request_id, result.error, now)
