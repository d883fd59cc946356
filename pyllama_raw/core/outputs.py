"""What a step that worked gave: tokens, the events that tell of them, and what ends."""

from __future__ import annotations

from collections.abc import Sequence as Items

from pyllama_raw.core.limits import ContextLimits
from pyllama_raw.core.request import (
    Delta,
    FinishDetail,
    FinishReason,
    LengthLimit,
    StopString,
    StopToken,
)
from pyllama_raw.core.roster import Roster
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.step import StepPlan, StepResult

new = tuple.__new__  # makes a NamedTuple in half the time, where there is one a token


class Outputs:
    """Takes in tokens and ends the requests that have all of theirs."""

    def __init__(
        self,
        roster: Roster,
        limits: ContextLimits,
        pieces: Items[bytes],
        n_keep: int | None,
    ) -> None:
        """
        Args:
            pieces: bytes of each token, read for stop strings.
            n_keep: of a full slot that many first tokens stay, and the older half of the
                others goes; None: its request ends.
        """
        self._roster = roster
        self._memory = roster.memory
        self._limits = limits
        self._pieces = pieces
        self._n_keep = n_keep

    def take(self, plan: StepPlan, result: StepResult, now: float) -> int:
        """
        Take in one step; returns the number of tokens computed.

        Every token of every stream comes through here: calls are few on purpose.
        """
        n_tokens = n_output = 0
        rows = iter(result.tokens)
        alive, advance = self._roster.alive, self._memory.advance
        for request_id, slot, _, tokens, wants_output, targets in plan.chunks:
            token = next(rows) if wants_output else None
            sequence = alive.get(request_id)
            if slot in result.not_restored:
                continue
            n_computed = len(tokens)
            n_tokens += n_computed
            if sequence is None:
                continue  # ended while the step ran
            advance(sequence, n_computed)
            if targets is not None:
                sequence.prompt_logprobs += result.scores[request_id]
            if token is not None:
                n_output += 1
                self._take_token(sequence, token, result, now)
            elif wants_output:  # its sampler failed
                error = result.row_errors[request_id]
                self._roster.finish(sequence, error, now)
        counters = self._roster.counters
        counters.computed_tokens += n_tokens
        counters.output_tokens += n_output
        return n_tokens

    def _take_token(
        self, sequence: Sequence, token: int, result: StepResult, now: float
    ) -> None:
        """Tell what was sampled of *sequence*, and end it if that was all."""
        request_id = sequence.request.request_id
        sequence.append(token, now)
        logprobs = result.logprobs.get(request_id)
        self._roster.events.append(new(Delta, (request_id, (token,), logprobs)))
        self._end_if_done(sequence, token, now)

    def _end_if_done(self, sequence: Sequence, token: int, now: float) -> None:
        """End the request if *token* is its last one."""
        request = sequence.request
        if token in request.stop_token_ids:
            self._finish(sequence, FinishReason.STOP, StopToken(token), now)
        elif (
            sequence.stop_finder is not None
            and (stop := self._stop_string(sequence, token)) is not None
        ):
            self._finish(
                sequence,
                FinishReason.STOP,
                StopString(stop.decode("utf-8", "replace")),
                now,
            )
        elif sequence.n_output >= request.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, LengthLimit.MAX_TOKENS, now)
        elif len(sequence.tokens) >= self._limits.n_ctx_slot:
            self._on_full(sequence, now)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, detail: FinishDetail, now: float
    ) -> None:
        sequence.detail = detail
        self._roster.finish(sequence, reason, now)

    def _stop_string(self, sequence: Sequence, token: int) -> bytes | None:
        """The one that *token* completes."""
        finder = sequence.stop_finder
        assert finder is not None
        finder.push(self._pieces[token])
        return finder.stop

    def _on_full(self, sequence: Sequence, now: float) -> None:
        """The slot has no position for another token: drop the older half, or end."""
        n_keep = self._n_keep
        n_discard = 0 if n_keep is None else (len(sequence.tokens) - 1 - n_keep) // 2
        if n_keep is None or n_discard < 1:
            self._finish(sequence, FinishReason.LENGTH, LengthLimit.SLOT, now)
            return
        shifted = self._memory.shift(sequence, n_keep, n_discard)
        self._roster.counters.shifted += shifted
