"""
One output of a generation, put together from its events.

Tokens become text here, in the reader's thread, while the engine computes the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from pyllama_raw.api.output_text import OutputText
from pyllama_raw.api.reply import Reply, ReplyForm
from pyllama_raw.api.results import Delta, Result, Timings, Usage, timings_of
from pyllama_raw.core import request as core
from pyllama_raw.core.request import Finished, FinishReason, Request, TokenLogprobs
from pyllama_raw.errors import PyllamaError

NO_NAMES: Mapping[int, bytes] = MappingProxyType({})


class Choice:
    """The part of one output that has been read."""

    def __init__(
        self,
        index: int,
        request: Request,
        seed: int,
        pieces: Sequence[bytes],
        names: Mapping[int, bytes] = NO_NAMES,
    ) -> None:
        """
        Args:
            pieces: bytes of each token; control tokens have none.
            names: names of control tokens, if the request asks for log-probabilities.
        """
        self.index = index
        self.request = request
        self.finished: Finished | None = None
        self.error: PyllamaError | None = None
        self._seed = seed
        self._pieces, self._names = pieces, names
        form = request.reply
        self._text: OutputText | Reply = (
            Reply(form, request, pieces)
            if isinstance(form, ReplyForm)
            else OutputText(request, pieces)
        )
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # one a token, or none at all
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._n_shown = 0  # tokens that deltas have shown
        self._is_fresh = False

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def n_tokens(self) -> int:
        return len(self._tokens)

    def take(self, event: core.Event) -> bool:
        """Add one event; True if take_delta() has something to show since now."""
        if type(event) is core.NewTokens:
            self._tokens += event.tokens
            self._logprobs += self._spelt(event.logprobs)
            self._text.take(event.tokens)
        else:
            assert isinstance(event, Finished)
            self.finished, self.error = event, event.error
            self._prompt_logprobs = tuple(self._spelt(event.prompt_logprobs))
            if not self._text.finish():
                return False
        was_fresh, self._is_fresh = self._is_fresh, True
        return not was_fresh

    def _spelt(self, entries: Iterable[TokenLogprobs]) -> Iterable[TokenLogprobs]:
        """*entries* with the bytes of their tokens."""
        for entry in entries:
            top = tuple(self._piece(token) for token, _ in entry.top)
            yield entry._replace(piece=self._piece(entry.token_id), top_pieces=top)

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] or self._names.get(token, b"")

    def take_delta(self) -> Delta:
        """The part that was not shown before."""
        self._is_fresh = False
        text, parts = self._text.take_shown()
        tokens = tuple(self._tokens[self._n_shown :])
        logprobs = tuple(self._logprobs[self._n_shown :])
        self._n_shown = len(self._tokens)
        return Delta(text, tokens, self.index, logprobs, parts)

    def result(self, elapsed_s: float) -> Result:
        """All of it; an output that was left has taken *elapsed_s*."""
        finished = self.finished
        reason: FinishReason | None = FinishReason.CANCELLED
        timings = Timings(None, None, None, None, None, elapsed_s)
        n_cached, tier = 0, None
        used = detail = None
        if finished is not None:
            reason, timings = finished.reason, timings_of(finished)
            n_cached, tier = finished.n_cached, finished.cache_tier
            used, detail = finished.sampler, finished.detail
        assert reason is not None
        return Result(
            text=self._text.content,
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            usage=Usage(
                self.request.n_prompt,
                len(self._tokens),
                n_cached,
                tier,
                sum(span.stop - span.start for span in self.request.spans),
                self._text.n_reasoning,
            ),
            timings=timings,
            seed=self._seed,
            index=self.index,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            sampler=used,
            finish_detail=detail,
            reasoning=self._text.reasoning,
            tool_calls=self._text.calls,
        )
