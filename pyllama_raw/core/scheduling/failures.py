"""
Failures: what goes on after a step that did not work.

All go on from the tokens that are known; only a request that fails alone, twice, ends with
the error.
"""

from __future__ import annotations

from collections.abc import Collection

from pyllama_raw.core.exact import N_FRESH
from pyllama_raw.core.scheduling.packer import Packer
from pyllama_raw.core.scheduling.roster import Roster
from pyllama_raw.core.scheduling.suspects import Part, Suspects
from pyllama_raw.core.step import DecodeStatus, Held, StepPlan, StepResult


class Failures:
    """Takes in steps that were aborted, found no space or failed."""

    def __init__(self, roster: Roster, packer: Packer, suspects: Suspects) -> None:
        self._roster = roster
        self._slots = roster.slots
        self._packer = packer
        self._suspects = suspects

    def take(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Undo in *plan* what the context has not done."""
        counters = self._roster.counters
        match result.status:
            case DecodeStatus.ABORTED:
                counters.aborted_steps += 1
                self._rewind(plan, result)
            case DecodeStatus.NO_SPACE:
                counters.no_space_steps += 1
                self._squeeze(plan, now)
            case _:  # INVALID, FAILED
                counters.failed_steps += 1
                self._fail(plan, result, now)

    def lose_slots(self) -> None:
        """The context is another one, and empty."""
        self._roster.counters.rebuilds += 1
        self._roster.memory.forget_slots()
        self._packer.repeat(from_start=True)

    def _rewind(self, plan: StepPlan, result: StepResult) -> None:
        for work, output in zip(plan.works, result.outputs, strict=True):
            running = self._slots.running.get(work.request_id)
            if running is not None:
                sequence = running.sequence
                n_held = 0
                if isinstance(output, Held):
                    n_held = running.n_computed + output.n_tokens
                # The last token is computed again: its output row was not sampled.
                n_fresh = min(N_FRESH, len(work.tokens))
                is_prompt = running.n_computed < sequence.n_chunked
                n_tokens = sequence.n_in_chunks if is_prompt else len(running.tokens)
                known = min(n_held, n_tokens - n_fresh)
                if sequence.is_scoring:  # nor were those of its other tokens
                    known = min(known, len(sequence.prompt_logprobs))
                self._slots.rewind(running, known)

    def _squeeze(self, plan: StepPlan, now: float) -> None:
        """libllama found no room: take smaller prefill chunks, then preempt."""
        self._roster.memory.reclaim(self._slots.limits.n_cells)
        n_prefill = sum(len(w.tokens) for w in plan.works if len(w.tokens) > 1)
        self._packer.prefill_cap = max(n_prefill // 2, 1)
        if plan.lot.is_whole or not n_prefill:
            self._make_room(plan, now)

    def _make_room(self, plan: StepPlan, now: float) -> None:
        """Preempt a sequence; one that is alone is computed anew, and ends the second time."""
        running = list(self._slots.running.values())
        if len(running) == 1:
            parts = self._parts(plan)
            self._slots.rewind(running[0], 0)  # its cells may have lain badly
            if parts and self._suspects.accuse(parts, alone=True) is None:
                return
        self._roster.make_room(now)

    def _fail(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """All go on, with what is known of them, but for the one that is sure to be the cause."""
        assert result.error is not None
        roster, is_fatal = self._roster, result.status is DecodeStatus.FAILED
        parts = self._parts(plan, result.not_restored)
        alone = len(plan.works) == 1
        if is_fatal:
            self.lose_slots()
        else:
            for running, _ in parts if alone else ():
                self._slots.rewind(
                    running, 0
                )  # it may hold something else than is believed
            self._packer.repeat(from_start=False)
        culprit = self._suspects.accuse(parts, alone=alone)
        if culprit is not None:
            roster.finish(culprit, result.error, now)

    def _parts(self, plan: StepPlan, lost: Collection[int] = ()) -> list[Part]:
        """What was to be computed of sequences that run, but for those in slots *lost*."""
        return [
            Part(running, running.n_computed + len(work.tokens))
            for work in plan.works
            if (running := self._slots.running.get(work.request_id)) is not None
            and work.slot not in lost
        ]
