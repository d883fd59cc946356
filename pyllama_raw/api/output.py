"""
One output of a generation: events in, deltas and a result out.

Rules:
1. Tokens become text here, in the reader's thread, while the engine computes the next ones.
2. A parser takes an output apart only if it may be anything else than content. Otherwise the
   bytes of a step become text at once.
3. The result is made once, when the output has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from pyllama_raw.api.results import Delta, Result, Timings, Usage, timings_of
from pyllama_raw.core import request as core
from pyllama_raw.core.detokenizer import Detokenizer
from pyllama_raw.core.request import Finished, FinishReason, Request, TokenLogprobs
from pyllama_raw.errors import PyllamaError
from pyllama_raw.prompts.reply import ReplyForm, ReplyReader
from pyllama_raw.replies.parts import (
    CallDelta,
    Content,
    Part,
    Reasoning,
    calls_of,
    text_of,
)

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
        self._text = OutputText(request, pieces)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # one a token, or none at all
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._n_shown = 0  # tokens that deltas have shown
        self._is_fresh = False
        self._result: Result | None = None  # once it has ended

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
            if event.logprobs:
                self._logprobs += self._spelt(event.logprobs)
            self._text.take(event.tokens)
        else:
            assert isinstance(event, Finished)
            self.finished, self.error = event, event.error
            if event.prompt_logprobs:
                self._prompt_logprobs = tuple(self._spelt(event.prompt_logprobs))
            if not self._text.finish():
                return False
        was_fresh, self._is_fresh = self._is_fresh, True
        return not was_fresh

    def _spelt(self, entries: Iterable[TokenLogprobs]) -> Iterator[TokenLogprobs]:
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
        if self._result is not None:
            return self._result
        finished, parts = self.finished, self._text.parts
        if finished is None:
            # Its reader has left it: more of it may come yet.
            reason: FinishReason | None = FinishReason.CANCELLED
            timings = Timings(None, None, None, None, None, elapsed_s)
            n_cached, tier, sampler, detail = 0, None, None, None
        else:
            reason, timings = finished.reason, timings_of(finished)
            n_cached, tier = finished.n_cached, finished.cache_tier
            sampler, detail = finished.sampler, finished.detail
        assert reason is not None
        usage = Usage(
            self.request.n_prompt,
            len(self._tokens),
            n_cached,
            tier,
            sum(span.stop - span.start for span in self.request.spans),
            self._text.n_reasoning,
        )
        result = Result(
            text=text_of(parts, Content),
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            usage=usage,
            timings=timings,
            seed=self._seed,
            index=self.index,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            sampler=sampler,
            finish_detail=detail,
            reasoning=text_of(parts, Reasoning),
            tool_calls=calls_of(parts),
        )
        if finished is not None:
            self._result = result
        return result


class OutputText:
    """The text of one output, as parts. A parser makes them if the output needs one."""

    def __init__(self, request: Request, pieces: Sequence[bytes]) -> None:
        self._names, self._pieces = request.names, pieces
        self._ends = request.stop_token_ids
        form = request.reply
        self._shows_parts = isinstance(form, ReplyForm)
        self._reader: ReplyReader | None = None
        if isinstance(form, ReplyForm) and form.make_parser is not None:
            self._reader = ReplyReader(form, request.stop, request.stop_token_ids)
        else:
            self._detokenizer = Detokenizer(request.stop)
        self.parts: list[Part] = []
        self._n_shown = 0  # parts that deltas have shown
        self._n_silent = 0  # tokens that made no part yet
        self.n_reasoning = 0  # tokens

    def take(self, tokens: tuple[int, ...]) -> None:
        """Take in the next tokens, of which the last one may end the output."""
        if self._reader is None:
            # All of it is content. A token that ends the output has no text.
            tokens_shown = tokens[:-1] if tokens[-1] in self._ends else tokens
            pieces = [self._pieces[token] for token in tokens_shown]
            if self._names:
                pairs = zip(pieces, tokens_shown, strict=True)
                pieces = [piece or self._names.get(t, b"") for piece, t in pairs]
            if text := self._detokenizer.push(b"".join(pieces)):
                self.parts.append(Content(text))
            return
        for token in tokens:
            piece = self._pieces[token] or self._names.get(token, b"")
            self._n_silent += 1
            self._add(self._reader.take(token, piece))

    def finish(self) -> bool:
        """Take in what was held back; whether there are more parts now."""
        n_before = len(self.parts)
        if self._reader is not None:
            self._add(self._reader.finish())
        elif text := self._detokenizer.flush():
            self.parts.append(Content(text))
        return len(self.parts) > n_before

    def _add(self, parts: Sequence[Part]) -> None:
        """A token that makes no part belongs to the part that comes next."""
        if not parts:
            return
        self.parts += parts
        if isinstance(parts[0], Reasoning):
            self.n_reasoning += self._n_silent
        self._n_silent = 0

    def take_shown(self) -> tuple[str, tuple[Part, ...]]:
        """The content and the parts that were not shown before, neighbours of a kind as one."""
        new = self.parts[self._n_shown :]
        self._n_shown = len(self.parts)
        if len(new) > 1:
            new = list(merged(new))
        text = text_of(new, Content)
        return text, tuple(new) if self._shows_parts else ()


def merged(parts: Iterable[Part]) -> Iterator[Part]:
    """*parts* with one in the place of neighbours of a kind, or of a call."""
    for _, neighbours in groupby(parts, _kind):
        first, *following = neighbours
        if isinstance(first, CallDelta):
            arguments = "".join(map(_text, following))
            yield replace(first, arguments=first.arguments + arguments)
        else:
            yield replace(first, text=first.text + "".join(map(_text, following)))


def _kind(part: Part) -> tuple[type, int | None]:
    return type(part), part.index if isinstance(part, CallDelta) else None


def _text(part: Part) -> str:
    return part.arguments if isinstance(part, CallDelta) else part.text
