"""
Continuous batching: who runs, and what the next step computes.

Rules, in this order:
1. Every sequence that can decode advances in each step; prefill takes what is left of
   the token budget, and always some.
2. A waiting request starts when a slot is free and the cells it will need are not
   promised to others. A blocked head of the queue is overtaken a bounded number of times.
3. When memory is short, the sequence of the worst rank gives its cells up and is
   computed again later. Only a sequence that is alone and does not fit is ended.
4. Every request ends exactly once, with a `Finished` event.

The caller passes the time in; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pyllama_raw.core.budget import StepBudget
from pyllama_raw.core.deadlines import Deadlines
from pyllama_raw.core.prefill import PrefillTurns
from pyllama_raw.core.request import Delta, Event, FinishReason, Request
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.slots import ContextLimits, Slots, need
from pyllama_raw.core.stats import Counters, SchedulerStats
from pyllama_raw.core.step import Chunk, DecodeStatus, Shift, StepPlan, StepResult, Trim
from pyllama_raw.core.waiting import WaitingQueue
from pyllama_raw.errors import NoKVSpace, PromptTooLong, PyllamaError

ADMISSION_WINDOW = 64  # waiting requests looked at in one step


class Scheduler:
    """Plans steps and turns their results into events. One thread owns it."""

    def __init__(
        self,
        limits: ContextLimits,
        pieces: Mapping[int, bytes],
        *,
        token_budget: int | None = None,
        target_step_s: float = 0.2,
        prefill_quantum: int = 256,
        max_waiting: int = 1024,
        max_waiting_tokens: int = 2**20,
        max_overtakes: int = 16,
        context_full: Literal["stop", "shift"] = "stop",
        n_keep: int = 4,
    ) -> None:
        assert limits.n_batch >= limits.n_slots
        self.limits = limits
        self._pieces = pieces
        self._max_overtakes = max_overtakes
        self._shifts_when_full = context_full == "shift" and limits.can_shift
        self._n_keep = n_keep
        self._budget = StepBudget(token_budget, target_step_s, limits.n_batch)
        self._turns = PrefillTurns(prefill_quantum)
        self._waiting = WaitingQueue(max_waiting, max_waiting_tokens)
        self._slots = Slots(limits)
        self._deadlines = Deadlines()
        self._alive: dict[int, Sequence] = {}
        self._counters = Counters()
        self._events: list[Event] = []  # that arose outside apply()
        self._releases: list[int] = []  # slots to clear in the next step
        self._trims: list[Trim] = []
        self._shifts: list[Shift] = []
        self._prefill_cap: int | None = None  # after a step that found no space
        self._started = 0.0  # when the last plan was made

    # -- requests ---------------------------------------------------------------

    @property
    def n_ctx_slot(self) -> int:
        """Prompt and output tokens one request may have together."""
        return self.limits.n_ctx_slot

    @property
    def has_work(self) -> bool:
        """Whether schedule() could find something to compute."""
        return bool(self._alive)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        return self._deadlines.next(self._alive)

    def add(self, request: Request, now: float) -> None:
        """
        Queue *request*.

        Raises:
            PromptTooLong: it leaves no room for an output token; nothing is queued.
            QueueFull: a limit of the queue is reached; nothing is queued.
        """
        assert request.request_id not in self._alive
        if request.n_prompt >= self.limits.n_ctx_slot:
            raise PromptTooLong(request.n_prompt, self.limits.n_ctx_slot)
        self._waiting.check_room(request.n_prompt)
        sequence = Sequence(request, self._counters.submitted, now)
        self._counters.submitted += 1
        self._alive[request.request_id] = sequence
        self._waiting.push(sequence)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.request_id)

    def cancel(self, request_id: int, now: float) -> bool:
        """End a request at once; False if it has ended already."""
        sequence = self._alive.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence, FinishReason.CANCELLED, now)
        return True

    def take_events(self) -> list[Event]:
        """Events that arose outside apply(): cancelled, past the deadline, no space."""
        events, self._events = self._events, []
        return events

    # -- plan -------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step; a falsy plan means that there is nothing to do."""
        for request_id in self._deadlines.expired(now):
            sequence = self._alive.get(request_id)
            if sequence is not None:
                self._finish(sequence, FinishReason.DEADLINE, now)
        self._admit(now)
        chunks = self._chunks(now)
        plan = StepPlan(
            releases=tuple(self._releases),
            trims=tuple(self._trims),
            shifts=tuple(self._shifts),
            chunks=tuple(chunks),
        )
        self._releases.clear()
        self._trims.clear()
        self._shifts.clear()
        self._started = now
        return plan

    def _admit(self, now: float) -> None:
        if not self._waiting or not self._slots.has_free:
            return
        alone = not self._slots.running
        if self._prefill_cap is not None and not alone:
            return  # libllama lacks space: start nobody until a step has worked
        room = self._slots.n_unpromised
        blocked: Sequence | None = None
        for sequence in self._waiting.first(ADMISSION_WINDOW):
            wanted = need(sequence)
            if wanted > room and not alone:
                blocked = blocked or sequence
            else:
                room -= wanted
                alone = False
                self._start(sequence, now)
                if blocked is not None:
                    blocked.n_overtaken += 1
            at_limit = blocked and blocked.n_overtaken >= self._max_overtakes
            if at_limit or not self._slots.has_free:
                return

    def _start(self, sequence: Sequence, now: float) -> None:
        self._waiting.remove(sequence)
        self._slots.place(sequence)
        if sequence.admitted is None:
            sequence.admitted = now

    def _chunks(self, now: float) -> list[Chunk]:
        decodes, prompts = self._ready(now)
        n_decodes = len(decodes)
        chunks = [
            Chunk(s.request.request_id, s.slot or 0, s.n_computed, s.tokens[-1:], True)
            for s in decodes
        ]
        if not prompts:
            return chunks
        shares = self._turns.share(self._prefill_budget(n_decodes), prompts)
        for s in prompts:
            slot = s.slot or 0
            n_tokens = shares.get(slot, 0)
            if n_tokens:
                pos = s.n_computed
                tokens = s.tokens[pos : pos + n_tokens]
                done = pos + n_tokens == len(s.tokens)
                chunks.append(Chunk(s.request.request_id, slot, pos, tokens, done))
        return chunks

    def _ready(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that decode and that prefill; preempts until all decodes fit."""
        while True:
            running = self._slots.running
            decodes = [s for s in running if s.n_behind == 1]
            if len(decodes) <= self._slots.n_free_cells:
                return decodes, [s for s in running if s.n_behind > 1]
            self._make_room(now)

    def _prefill_budget(self, n_decodes: int) -> int:
        budget = self._budget.limit(streams=n_decodes > 0)
        left = max(budget - n_decodes, budget // 8, 1)
        if self._prefill_cap is not None:
            left = min(left, self._prefill_cap)
        return min(
            left,
            self.limits.n_batch - n_decodes,
            self._slots.n_free_cells - n_decodes,
        )

    # -- results ----------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Take in what the executor did; returns the events of this step in order."""
        self._counters.steps += 1
        match result.status:
            case DecodeStatus.OK:
                self._prefill_cap = None
                self._take_tokens(plan, result, now)
                self._budget.observe(plan.n_tokens, now - self._started)
            case DecodeStatus.ABORTED:
                self._counters.aborted_steps += 1
                self._rewind(plan, result.n_computed)
            case DecodeStatus.NO_SPACE:
                self._counters.no_space_steps += 1
                self._squeeze(plan, now)
            case DecodeStatus.INVALID | DecodeStatus.FAILED:
                self._fail(plan, result, now)
        return self.take_events()

    def _take_tokens(self, plan: StepPlan, result: StepResult, now: float) -> None:
        tokens = iter(result.tokens)
        for chunk in plan.chunks:
            token = next(tokens) if chunk.wants_output else None
            sequence = self._alive.get(chunk.request_id)
            if sequence is None:  # ended while the step ran
                continue
            self._slots.compute(sequence, len(chunk.tokens))
            self._counters.computed_tokens += len(chunk.tokens)
            if token is not None:
                self._take_token(sequence, token, now)
            elif chunk.wants_output:
                self._finish(sequence, result.row_errors[chunk.request_id], now)

    def _take_token(self, sequence: Sequence, token: int, now: float) -> None:
        request = sequence.request
        sequence.append(token, now)
        self._counters.output_tokens += 1
        detokenizer = sequence.detokenizer
        if token in request.stop_token_ids:
            self._events.append(Delta(request.request_id, token, ""))
            self._finish(sequence, FinishReason.STOP, now)
            return
        text = detokenizer.push(self._pieces[token])
        self._events.append(Delta(request.request_id, token, text))
        if detokenizer.stopped:
            self._finish(sequence, FinishReason.STOP, now)
        elif sequence.n_output >= request.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, now)
        elif len(sequence.tokens) >= self.limits.n_ctx_slot:
            self._on_full(sequence, now)

    def _on_full(self, sequence: Sequence, now: float) -> None:
        """The slot has no position for another token: drop the older half, or end."""
        n_discard = (len(sequence.tokens) - 1 - self._n_keep) // 2
        if not self._shifts_when_full or n_discard < 1:
            self._finish(sequence, FinishReason.LENGTH, now)
            return
        self._counters.shifted += 1
        self._slots.shift(sequence, self._n_keep, n_discard)
        self._shifts.append(Shift(sequence.slot or 0, self._n_keep, n_discard))

    # -- failures ---------------------------------------------------------------

    def _rewind(self, plan: StepPlan, n_computed: Mapping[int, int]) -> None:
        for chunk in plan.chunks:
            sequence = self._alive.get(chunk.request_id)
            if sequence is not None:
                # The last token is computed again: its output row was not sampled.
                kept = min(n_computed.get(chunk.slot, 0), len(sequence.tokens) - 1)
                self._slots.rewind(sequence, kept)
                self._trims.append(Trim(chunk.slot, kept))

    def _squeeze(self, plan: StepPlan, now: float) -> None:
        """libllama found no room: take smaller prefill chunks, then preempt."""
        n_prefill = sum(len(c.tokens) for c in plan.chunks if len(c.tokens) > 1)
        self._prefill_cap = max(n_prefill // 2, 1)
        if not n_prefill:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        """Preempt the worst ranked sequence; one that is alone ends instead."""
        running = self._slots.running
        if not running:
            return
        victim = max(running, key=lambda s: s.rank)
        if len(running) == 1:
            message = f"{len(victim.tokens)} tokens do not fit; raise n_ctx"
            self._finish(victim, NoKVSpace("llama_decode", 1, message), now)
            return
        self._counters.preempted += 1
        victim.n_preempted += 1
        self._vacate(victim)
        self._waiting.push(victim)

    def _fail(self, plan: StepPlan, result: StepResult, now: float) -> None:
        assert result.error is not None
        for chunk in plan.chunks:
            sequence = self._alive.get(chunk.request_id)
            if sequence is not None:
                self._finish(sequence, result.error, now)
        if result.status is DecodeStatus.FAILED:  # the new context is empty
            for sequence in self._slots.running:
                self._slots.rewind(sequence, 0)

    def _finish(
        self, sequence: Sequence, end: FinishReason | PyllamaError, now: float
    ) -> None:
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._vacate(sequence)
        del self._alive[sequence.request.request_id]
        if isinstance(end, FinishReason):
            self._counters.finished[end] += 1
            self._events.append(sequence.finish(end, None, now))
        else:
            self._counters.failed += 1
            self._events.append(sequence.finish(None, end, now))

    def _vacate(self, sequence: Sequence) -> None:
        slot = self._slots.remove(sequence)
        self._releases.append(slot)
        self._trims = [trim for trim in self._trims if trim.slot != slot]
        self._shifts = [shift for shift in self._shifts if shift.slot != slot]

    # -- views ------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """The state of this moment and all totals."""
        counters = self._counters
        return SchedulerStats(
            n_slots=self.limits.n_slots,
            running=len(self._slots.running),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.n_tokens,
            n_cells=self.limits.n_cells,
            n_cells_used=self._slots.n_used,
            submitted=counters.submitted,
            finished={str(k): n for k, n in counters.finished.items()},
            failed=counters.failed,
            preempted=counters.preempted,
            shifted=counters.shifted,
            steps=counters.steps,
            aborted_steps=counters.aborted_steps,
            no_space_steps=counters.no_space_steps,
            computed_tokens=counters.computed_tokens,
            output_tokens=counters.output_tokens,
        )

    def check_integrity(self) -> None:
        """The conservation laws; raises AssertionError."""
        self._slots.check_integrity()
        self._waiting.check_integrity()
        running, waiting = self._slots.running, list(self._waiting)
        assert {id(s) for s in (*running, *waiting)} == {
            id(s) for s in self._alive.values()
        }
        assert len(running) + len(waiting) == len(self._alive)
        stats = self.stats()
        ended = sum(stats.finished.values()) + stats.failed
        assert ended + stats.running + stats.waiting == stats.submitted
