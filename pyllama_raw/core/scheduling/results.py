"""
Results of steps: tokens and ends where one worked, and what goes on where it did not.

1. A step that worked gives each stream its tokens. A request that has all of its ends.
2. After a step that did not work all go on from the tokens that are known. Only a
   request that fails alone, twice, ends with the error: see `Suspects`.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

from pyllama_raw.core.request import (
    FinishDetail,
    FinishReason,
    LengthLimit,
    NewTokens,
    StopToken,
)
from pyllama_raw.core.scheduling.lots import Part, Suspects
from pyllama_raw.core.scheduling.packer import Packer
from pyllama_raw.core.scheduling.roster import Roster
from pyllama_raw.core.sequence import N_FRESH, Running
from pyllama_raw.core.step import (
    DecodeStatus,
    Lost,
    Output,
    PartlyComputed,
    RowFailed,
    Sampled,
    Scored,
    StepPlan,
    StepResult,
    Verify,
    Work,
)

End = tuple[FinishReason, FinishDetail]

new = tuple.__new__  # makes a NamedTuple in half the time, where there is one a token


class Outputs:
    """Takes in tokens and ends the requests that have all of theirs."""

    def __init__(
        self,
        roster: Roster,
        pieces: Items[bytes],
        n_keep: int | None,
    ) -> None:
        """
        Args:
            pieces: bytes of each token, read for stop strings.
            n_keep: first tokens that stay in a full slot, which loses the older half of
                the others; None: its request ends.
        """
        self._roster = roster
        self._slots = roster.slots
        self._pieces = pieces
        self._n_keep = n_keep

    def take(self, works: Items[Work], outputs: Items[Output], now: float) -> int:
        """
        Take in one step; returns the number of tokens computed.

        Every token of every stream comes through here: calls are few on purpose.
        """
        n_tokens = n_output = 0
        all_running, advance = self._slots.running, self._slots.advance
        for work, output in zip(works, outputs, strict=True):
            n_new = n_held = len(work.tokens)
            # None: the request ended meanwhile, and what it held goes with its slot.
            running = all_running.get(work.request_id)
            # Accepted drafts are counted as what was sampled, and the others are not held.
            n_accepted = 0
            if n_new > 1 and type(work) is Verify:
                n_held = 1
                n_accepted = self._count_drafts(running, n_new - 1, output)
            if type(output) is Sampled:
                # The most frequent case: one token of a stream, or the first of a prompt.
                if running is not None:
                    advance(running, n_held)
                    n_output += self._take_sampled(running, output, now, n_accepted)
            elif type(output) is Lost:
                # Its slot could not be filled, so nothing was computed of it.
                continue
            elif running is not None:
                # A chunk of a prompt without a row, one that is scored, or a row that failed.
                advance(running, n_held)
                n_output += self._take_other(running, output, now)
            n_tokens += n_new
        counters = self._roster.counters
        counters.computed_tokens += n_tokens
        counters.output_tokens += n_output
        return n_tokens

    def _count_drafts(
        self, running: Running | None, n_drafts: int, output: Output
    ) -> int:
        """Count drafts of a work; returns those that were sampled."""
        n_accepted = len(output.tokens) - 1 if type(output) is Sampled else 0
        self._roster.counters.drafted_tokens += n_drafts
        if running is not None:
            running.sequence.n_drafted += n_drafts
        return n_accepted

    def _take_other(self, running: Running, output: Output, now: float) -> int:
        """Take in what did not sample only; returns the number of output tokens."""
        sequence = running.sequence
        if type(output) is Scored:
            sequence.prompt_logprobs += output.logprobs
            output = output.then
        if type(output) is RowFailed:
            self._roster.finish(sequence, output.error, now)
        if type(output) is Sampled:
            return self._take_sampled(running, output, now)
        return 0

    def _take_sampled(
        self, running: Running, sampled: Sampled, now: float, n_accepted: int = 0
    ) -> int:
        """
        Tell what was sampled of *running*, or end it; returns the number of output tokens.

        Args:
            n_accepted: first tokens of it that were drafts.
        """
        tokens, logprobs, forced = sampled
        sequence = running.sequence
        sequence.forced = forced
        if forced:
            sequence.forces = True
        n_taken = len(tokens)
        if n_taken == 1:
            end = self._take_token(running, tokens[0], now)
        else:
            # The slot holds all of several tokens but the last one.
            n_before, n_sampled = sequence.n_output, n_taken
            self._slots.advance(running, n_sampled - 1)
            ends = (self._take_token(running, token, now) for token in tokens)
            end = next(filter(None, ends), None)
            if end is not None:
                n_taken = sequence.n_output - n_before
                tokens, logprobs = tokens[:n_taken], logprobs[:n_taken]
                # Memory may hold tokens that were sampled after the end.
                if n_taken < n_sampled:
                    can_cut = self._slots.limits.kind.can_cut
                    n_held = len(running.tokens) - 1 if can_cut else 0
                    self._slots.rewind(running, n_held)
            # Drafts behind the end are no part of the output.
            n_accepted = min(n_accepted, n_taken)
            self._roster.counters.accepted_tokens += n_accepted
            sequence.n_accepted += n_accepted
        request_id = running.request.request_id
        self._roster.events.append(new(NewTokens, (request_id, tokens, logprobs)))
        # Tokens are told before the end, which is an event of its own.
        if end is not None:
            reason, sequence.detail = end
            self._roster.finish(sequence, reason, now)
        return n_taken

    def _take_token(self, running: Running, token: int, now: float) -> End | None:
        """Take in one token; why the request ends with it, if it does."""
        sequence, request, tokens = running.sequence, running.request, running.tokens
        tokens.append(token)
        sequence.token_times.append(now)
        is_end = token in request.stop_token_ids
        is_full, finder = len(tokens) >= running.n_full, sequence.stop_finder
        # Nearly always it goes on.
        if not (is_end or is_full) and finder is None:
            return None
        has_all = len(tokens) >= sequence.n_complete
        if finder is not None:
            # A stop string before the end comes first: the last token may complete it.
            piece = self._pieces[token] or request.names.get(token, b"")
            stop = finder.take(token, piece, is_last=is_end or has_all)
            if stop is not None:
                return FinishReason.STOP, stop
        if is_end:
            return FinishReason.STOP, StopToken(token)
        if has_all:
            return FinishReason.LENGTH, LengthLimit.MAX_TOKENS
        return self._on_full(running) if is_full else None

    def _on_full(self, running: Running) -> End | None:
        """The slot has no position for another token: drop the older half, or end."""
        n_keep = self._n_keep
        n_discard = 0 if n_keep is None else (len(running.tokens) - 1 - n_keep) // 2
        # Without a shift, or with rows of an image, which cannot be moved, it ends.
        if n_keep is None or n_discard < 1 or running.request.spans:
            return FinishReason.LENGTH, LengthLimit.SLOT
        shifted = self._slots.shift(running, n_keep, n_discard)
        self._roster.counters.shifted += shifted
        return None


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
        """Keep what an aborted step has computed of each."""
        for work, output in zip(plan.works, result.outputs, strict=True):
            running = self._slots.running.get(work.request_id)
            if running is None:
                continue
            sequence = running.sequence
            n_held = 0
            if isinstance(output, PartlyComputed):
                n_held = running.n_computed + output.n_tokens
            # The last token is computed again: its output row was not sampled.
            n_fresh = 1 if type(work) is Verify else min(N_FRESH, len(work.tokens))
            is_prompt = running.n_computed < sequence.n_chunked
            n_tokens = sequence.n_in_chunks if is_prompt else len(running.tokens)
            n_held = min(n_held, n_tokens - n_fresh)
            # Nor were the rows of its other tokens, if they are scored.
            if sequence.is_scoring:
                n_held = min(n_held, sequence.n_unscored)
            self._slots.rewind(running, n_held)

    def _squeeze(self, plan: StepPlan, now: float) -> None:
        """libllama found no room: take smaller prefill chunks, then preempt."""
        self._roster.memory.reclaim(self._slots.limits.n_cells)
        n_prefill = sum(len(w.tokens) for w in plan.works if len(w.tokens) > 1)
        self._packer.prefill_cap = max(n_prefill // 2, 1)
        # Smaller chunks may fit, unless the rows must be computed at once.
        if n_prefill and not plan.lot.is_whole:
            return
        running = list(self._slots.running.values())
        if len(running) == 1:
            # It is alone and its cells may have lain badly: it is computed anew, and
            # ends the second time.
            parts = self._parts(plan)
            self._slots.rewind(running[0], 0)
            if parts and self._suspects.accuse(parts, alone=True) is None:
                return
        self._roster.make_room(now)

    def _fail(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """All go on from what is known, but for one that is sure to be the cause."""
        assert result.error is not None
        roster, is_fatal = self._roster, result.status is DecodeStatus.FAILED
        parts = self._parts(plan, result.not_restored)
        alone = len(plan.works) == 1
        # The context is not to be used any more: all is computed anew in another one.
        if is_fatal:
            self.lose_slots()
        else:
            # Alone it may hold something else than is believed.
            for running, _ in parts if alone else ():
                self._slots.rewind(running, 0)
            self._packer.repeat(from_start=False)
        culprit = self._suspects.accuse(parts, alone=alone)
        if culprit is not None:
            roster.finish(culprit, result.error, now)

    def _parts(self, plan: StepPlan, lost: Collection[int] = ()) -> list[Part]:
        """Parts of *plan*, of sequences that run and are not in slots *lost*."""
        return [
            Part(running, running.n_computed + len(work.tokens))
            for work in plan.works
            if (running := self._slots.running.get(work.request_id)) is not None
            and work.slot not in lost
        ]
