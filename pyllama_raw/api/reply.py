"""One output whose reply is taken apart into content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from pyllama_raw.api.reply_text import ReplyText, TextRun
from pyllama_raw.core.request import Request
from pyllama_raw.replies.parts import (
    CallDelta,
    Content,
    Part,
    Reasoning,
    ToolCall,
    calls_of,
    text_of,
)

if TYPE_CHECKING:
    from pyllama_raw.replies.parser import ReplyParser


class ReplyForm(NamedTuple):
    """The way in which the outputs of a request are taken apart."""

    make_parser: Callable[[], ReplyParser]  # for one output
    marks: Mapping[int, bytes]  # special tokens that the parser knows, and their names


class Reply:
    """The part of one reply that has been read."""

    def __init__(
        self, form: ReplyForm, request: Request, pieces: Sequence[bytes]
    ) -> None:
        self._parser = form.make_parser()
        self._marks = form.marks
        self._request = request
        self._pieces = pieces
        self._text = ReplyText(request.stop)
        self._parts: list[Part] = []
        self._n_shown = 0  # parts that deltas have shown
        self._n_silent = 0  # tokens that made no part yet
        self.n_reasoning = 0  # tokens

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens; one that ends the output counts if the parser knows it."""
        names, ends = self._request.names, self._request.stop_token_ids
        for token in tokens:
            mark = self._marks.get(token)
            if token in ends:
                runs = self._text.flush()
                runs += [TextRun(mark.decode(), True)] if mark else []
            else:
                piece = self._pieces[token] or names.get(token, b"")
                runs = self._text.push(piece, mark is not None)
            self._n_silent += 1
            self._feed(runs)

    def finish(self) -> bool:
        """Take in what was held back; whether there are more parts now."""
        n_before = len(self._parts)
        self._feed(self._text.flush())
        self._add(self._parser.finish())
        return len(self._parts) > n_before

    def take_shown(self) -> tuple[str, tuple[Part, ...]]:
        """The content and the parts that were not shown before, neighbours of a kind as one."""
        new = tuple(merged(self._parts[self._n_shown :]))
        self._n_shown = len(self._parts)
        return text_of(new, Content), new

    @property
    def content(self) -> str:
        return text_of(self._parts, Content)

    @property
    def reasoning(self) -> str:
        return text_of(self._parts, Reasoning)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls, by index."""
        return calls_of(self._parts)

    def _feed(self, runs: Iterable[TextRun]) -> None:
        for text, special in runs:
            self._add(self._parser.feed(text, special))

    def _add(self, parts: Sequence[Part]) -> None:
        """A token that makes no part belongs to the part that comes next."""
        if not parts:
            return
        self._parts += parts
        if isinstance(parts[0], Reasoning):
            self.n_reasoning += self._n_silent
        self._n_silent = 0


def merged(parts: Iterable[Part]) -> Iterator[Part]:
    """*parts* with one in the place of neighbours of a kind, or of a call."""
    for _, neighbours in groupby(parts, _kind):
        same = list(neighbours)
        first = same[0]
        if isinstance(first, CallDelta):
            yield replace(first, arguments="".join(map(_text, same)))
        else:
            yield replace(first, text="".join(map(_text, same)))


def _kind(part: Part) -> tuple[type, int | None]:
    return type(part), part.index if isinstance(part, CallDelta) else None


def _text(part: Part) -> str:
    return part.arguments if isinstance(part, CallDelta) else part.text
