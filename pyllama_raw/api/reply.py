"""
One reply that is taken apart while its tokens come: its parts, and where it ends.

The engine thread and the reader of a reply each take its tokens apart where it has stops: the
engine to end the request at a stop in the content, the reader to show what was before it. Both
use a ReplyReader, so they find the same stop whatever the deltas are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pyllama_raw.api.reply_text import ReplyText, TextRun
from pyllama_raw.core.detokenizer import Detokenizer
from pyllama_raw.core.request import Request, StopString, StopToken
from pyllama_raw.core.stop_strings import NO_STOPS, StopStrings
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
    from pyllama_raw.replies.writer import StopSearch


class MakeParser(Protocol):
    """Makes the parser of one output."""

    def __call__(self, *, search: StopSearch | None = None) -> ReplyParser:
        """A parser that looks for stops by *search* in the content."""


class ReplyForm(NamedTuple):
    """The way in which the outputs of a request are taken apart."""

    make_parser: MakeParser
    marks: Mapping[int, bytes]  # special tokens that the parser knows, and their names
    delimiters: frozenset[str] = frozenset()  # of what is not content; empty: all is
    stop: StopStrings = NO_STOPS  # looked for in the content only
    stop_token_ids: frozenset[int] = frozenset()  # likewise; all have text

    def with_stops(
        self, strings: Sequence[str], token_ids: frozenset[int], pieces: Sequence[bytes]
    ) -> tuple[ReplyForm, tuple[str, ...], frozenset[int]]:
        """
        This form, with the stops that belong to content; and the strings and tokens that end
        an output wherever they come.

        A stop string that has a delimiter in it is about the syntax of the reply. So is a token
        without text. What it begins or ends otherwise does not count any more.

        Args:
            token_ids: tokens that are not the end of a turn in any case.
        """
        if not self.delimiters:
            return self, tuple(strings), token_ids
        plain = [s for s in strings if not any(d in s for d in self.delimiters)]
        texts = {t for t in token_ids if pieces[t] and t not in self.marks}
        form = self._replace(
            marks={t: name for t, name in self.marks.items() if t not in token_ids},
            stop=stop_strings(plain),
            stop_token_ids=frozenset(texts),
        )
        others = tuple(string for string in strings if string not in plain)
        return form, others, token_ids - texts


def stop_strings(strings: Sequence[str]) -> StopStrings:
    """A table of *strings*; takes time in proportion to their length."""
    return StopStrings(tuple(s.encode() for s in strings)) if strings else NO_STOPS


class ReplyReader:
    """Takes the tokens of one output apart, up to its first stop."""

    def __init__(
        self, form: ReplyForm, strings: StopStrings, ends: frozenset[int]
    ) -> None:
        """
        Args:
            strings: stop strings that count everywhere.
            ends: tokens that end the output everywhere.
        """
        search = Detokenizer(form.stop) if form.stop else None
        self._parser = form.make_parser(search=search)
        self._marks, self._tokens, self._ends = form.marks, form.stop_token_ids, ends
        self._search = search
        self._text = ReplyText(strings)
        self._stop_token: StopToken | None = None

    @property
    def stop(self) -> StopString | StopToken | None:
        """The stop that the output ends before; None: it goes on."""
        found = self._search and self._search.stop  # before the end of all text
        found = found or self._text.stop
        if found is not None:
            return StopString(found.decode("utf-8", "replace"))
        return self._stop_token

    def take(self, token: int, piece: bytes) -> Sequence[Part]:
        """The parts that a token adds; one that ends the output if the parser knows it."""
        if self.stop is not None:
            return ()
        mark = self._marks.get(token)
        if token in self._ends:
            runs = self._text.flush()
            runs += [TextRun(mark.decode(), True)] if mark else []
        elif token in self._tokens and self._parser.is_in_content:
            self._stop_token = StopToken(token)
            runs = self._text.flush()
        else:
            runs = self._text.push(piece, mark is not None)
        return self._feed(runs)

    def finish(self) -> Sequence[Part]:
        """The parts that were held back; nothing follows them."""
        return [*self._feed(self._text.flush()), *self._parser.finish()]

    def _feed(self, runs: Iterable[TextRun]) -> list[Part]:
        return [
            part for text, special in runs for part in self._parser.feed(text, special)
        ]


class ReplyStops:
    """Looks for the first stop of an output, in the engine thread; see StopFinder."""

    def __init__(
        self, form: ReplyForm, strings: StopStrings, ends: frozenset[int]
    ) -> None:
        self._reader = ReplyReader(form, strings, ends)

    @classmethod
    def finder(
        cls, form: ReplyForm, strings: StopStrings, ends: frozenset[int]
    ) -> Callable[[], ReplyStops] | None:
        """Makes one for an output; None: the engine needs none, as no stop is of content."""
        if not (form.stop or form.stop_token_ids):
            return None
        return partial(cls, form, strings, ends)

    def take(
        self, token: int, piece: bytes, *, is_last: bool
    ) -> StopString | StopToken | None:
        """See StopFinder."""
        self._reader.take(token, piece)
        if is_last:
            self._reader.finish()
        return self._reader.stop


class Reply:
    """The part of one reply that has been read."""

    def __init__(
        self, form: ReplyForm, request: Request, pieces: Sequence[bytes]
    ) -> None:
        self._reader = ReplyReader(form, request.stop, request.stop_token_ids)
        self._names, self._pieces = request.names, pieces
        self._parts: list[Part] = []
        self._n_shown = 0  # parts that deltas have shown
        self._n_silent = 0  # tokens that made no part yet
        self.n_reasoning = 0  # tokens

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens."""
        for token in tokens:
            piece = self._pieces[token] or self._names.get(token, b"")
            self._n_silent += 1
            self._add(self._reader.take(token, piece))

    def finish(self) -> bool:
        """Take in what was held back; whether there are more parts now."""
        n_before = len(self._parts)
        self._add(self._reader.finish())
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
