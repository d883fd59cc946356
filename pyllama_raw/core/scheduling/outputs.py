"""Outputs of a step that worked: tokens, the events that tell of them, and ends."""

from __future__ import annotations

from collections.abc import Sequence as Items

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.request import (
    FinishDetail,
    FinishReason,
    LengthLimit,
    NewTokens,
    StopToken,
)
from pyllama_raw.core.scheduling.roster import Roster
from pyllama_raw.core.sequence import Running, Sequence
from pyllama_raw.core.step import Lost, Output, RowFailed, Sampled, Scored, Work

End = tuple[FinishReason, FinishDetail]

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
        self._slots = roster.slots
        self._limits = limits
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
            n_new = len(work.tokens)
            running = all_running.get(work.request_id)  # None: it ended meanwhile
            if type(output) is Sampled:
                if running is not None:
                    advance(running, n_new)
                    n_output += len(output.tokens)
                    self._take_sampled(running, output, now)
            elif type(output) is Lost:
                continue
            elif running is not None:
                advance(running, n_new)
                n_output += self._take_other(running, output, now)
            n_tokens += n_new
        counters = self._roster.counters
        counters.computed_tokens += n_tokens
        counters.output_tokens += n_output
        return n_tokens

    def _take_other(self, running: Running, output: Output, now: float) -> int:
        """Take in what did not sample only; returns the number of sampled tokens."""
        sequence = running.sequence
        if type(output) is Scored:
            sequence.prompt_logprobs += output.logprobs
            output = output.then
        if type(output) is RowFailed:
            self._roster.finish(sequence, output.error, now)
        if type(output) is Sampled:
            self._take_sampled(running, output, now)
            return len(output.tokens)
        return 0

    def _take_sampled(self, running: Running, sampled: Sampled, now: float) -> None:
        """Tell what was sampled of *running*, and end it if that was all."""
        tokens, logprobs = sampled
        sequence = running.sequence
        if len(tokens) == 1:
            end = self._take_token(sequence, tokens[0], now)
        else:
            n_before, n_sampled = sequence.n_output, len(tokens)
            self._slots.advance(running, n_sampled - 1)
            ends = (self._take_token(sequence, token, now) for token in tokens)
            end = next(filter(None, ends), None)
            if end is not None:
                n_taken = sequence.n_output - n_before
                tokens, logprobs = tokens[:n_taken], logprobs[:n_taken]
                self._forget(running, n_sampled - n_taken)
        request_id = running.request.request_id
        self._roster.events.append(new(NewTokens, (request_id, tokens, logprobs)))
        if end is not None:
            self._finish(sequence, *end, now)
        elif len(running.tokens) >= self._limits.n_ctx_slot:
            self._on_full(running, now)

    def _take_token(self, sequence: Sequence, token: int, now: float) -> End | None:
        """Take in one token; why the request ends with it, if it does."""
        sequence.tokens.append(token)
        sequence.token_times.append(now)
        sequence.n_output = n_output = sequence.n_output + 1
        request = sequence.request
        is_end, is_full = (
            token in request.stop_token_ids,
            n_output >= request.max_tokens,
        )
        finder = sequence.stop_finder
        if finder is not None:
            # A stop before the end comes first: the last token may show that there is one.
            piece = self._pieces[token] or request.names.get(token, b"")
            stop = finder.take(token, piece, is_last=is_end or is_full)
            if stop is not None:
                return FinishReason.STOP, stop
        if is_end:
            return FinishReason.STOP, StopToken(token)
        if is_full:
            return FinishReason.LENGTH, LengthLimit.MAX_TOKENS
        return None

    def _forget(self, running: Running, n_tokens: int) -> None:
        """Memory may hold *n_tokens* that were sampled after the end of *running*."""
        self._roster.counters.output_tokens -= n_tokens
        if n_tokens:
            can_cut = self._slots.limits.kind.can_cut
            self._slots.rewind(running, len(running.tokens) - 1 if can_cut else 0)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, detail: FinishDetail, now: float
    ) -> None:
        sequence.detail = detail
        self._roster.finish(sequence, reason, now)

    def _on_full(self, running: Running, now: float) -> None:
        """The slot has no position for another token: drop the older half, or end."""
        n_keep = self._n_keep
        n_discard = 0 if n_keep is None else (len(running.tokens) - 1 - n_keep) // 2
        if n_keep is None or n_discard < 1 or running.request.spans:
            reason, detail = FinishReason.LENGTH, LengthLimit.SLOT
            self._finish(running.sequence, reason, detail, now)
            return
        shifted = self._slots.shift(running, n_keep, n_discard)
        self._roster.counters.shifted += shifted
