"""
A reply while its tokens come: tokens to runs of text, runs to parts, and where it stops.

Rules:
1. The engine thread and the reader of an output each read it where it has stops in its content:
   the engine to end the request, the reader to show what was before the stop. Both use a
   ReplyReader, so they find the same stop whatever the deltas are.
2. A stop string may begin in the text and end in the name of a special token, or the other way
   round. So a name is held back while its bytes may begin a stop string.
3. The text of all runs is what a Detokenizer makes of the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pyllama_raw.core.request import StopString, StopToken
from pyllama_raw.core.text import NO_STOPS, Detokenizer, StopStrings
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.replies.parser import Part

if TYPE_CHECKING:
    from pyllama_raw.replies.parser import ReplyParser, StopSearch


class MakeParser(Protocol):
    """Makes the parser of one output."""

    def __call__(self, *, search: StopSearch | None = None) -> ReplyParser:
        """A parser that looks for stops by *search* in the content."""


class ReplyForm(NamedTuple):
    """The way in which the outputs of a request become parts."""

    make_parser: MakeParser | None  # None: all of an output is content
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
            stop=stop_strings(plain) if plain else NO_STOPS,
            stop_token_ids=frozenset(texts),
        )
        syntax = tuple(string for string in strings if string not in plain)
        return form, syntax, token_ids - texts


class PlannedReply(NamedTuple):
    """Wishes of a request for its outputs, as the engine and their reader take them."""

    params: SamplingParams
    form: ReplyForm | None  # None: an output is plain text
    stop: Sequence[str]  # strings that end an output wherever they come
    stop_token_ids: frozenset[int]  # likewise, beside the ends of generation
    n_relaxed: int = 0  # tools of whose schemas a part is not kept


def stop_strings(strings: Sequence[str]) -> StopStrings:
    """A table of *strings*; takes time in proportion to their length."""
    return StopStrings(tuple(string.encode() for string in strings))


class ReplyReader:
    """Takes the tokens of one output apart, up to its first stop."""

    def __init__(
        self, form: ReplyForm, strings: StopStrings, ends: frozenset[int]
    ) -> None:
        """
        Args:
            form: one that has a parser.
            strings: stop strings that count everywhere.
            ends: tokens that end the output everywhere.
        """
        assert form.make_parser is not None
        search = Detokenizer(form.stop) if form.stop else None
        self._parser = form.make_parser(search=search)
        self._marks, self._tokens, self._ends = form.marks, form.stop_token_ids, ends
        self._search = search
        self._text = TextRuns(strings)
        self._stop_token: StopToken | None = None

    @property
    def stop(self) -> StopString | StopToken | None:
        """The stop that the output ends before; None: it goes on."""
        # That of the content is before the end of all text.
        text = (self._search and self._search.stop) or self._text.stop
        if text is not None:
            return StopString(text.decode("utf-8", "replace"))
        return self._stop_token

    def take(self, token: int, piece: bytes) -> Sequence[Part]:
        """The parts that a token adds; one that ends the output if the parser knows it."""
        if self.stop is not None:
            return ()
        mark = self._marks.get(token)
        if token in self._ends:
            # What was held back is text now. The token itself has none, but a parser may
            # know its name, as that of the end of a call.
            runs = self._text.flush()
            runs += [TextRun(mark.decode(), True)] if mark else []
        elif token in self._tokens and self._parser.is_in_content:
            # A stop token of the content: in thoughts and calls it is text.
            self._stop_token = StopToken(token)
            runs = self._text.flush()
        else:
            runs = self._text.push(piece, mark is not None)
        return self._feed(runs)

    def finish(self) -> Sequence[Part]:
        """The parts that were held back; nothing follows them."""
        return [*self._feed(self._text.flush()), *self._parser.finish()]

    def _feed(self, runs: Iterable[TextRun]) -> list[Part]:
        feed = self._parser.feed
        return [part for text, special in runs for part in feed(text, special)]


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


class TextRun(NamedTuple):
    """A text of one kind."""

    text: str
    special: bool  # it is the name of one special token


class TextRuns:
    """Tokens in, runs out, in which each special token stands alone."""

    def __init__(self, strings: StopStrings) -> None:
        self._detokenizer = Detokenizer(strings)
        self._text = (
            ""  # certain, but the start of a name that is not certain as a whole
        )
        self._names: deque[tuple[int, str]] = deque()  # and their places, from _text on

    @property
    def stop(self) -> bytes | None:
        """The stop string that was met: the text is complete."""
        return self._detokenizer.stop

    def push(self, piece: bytes, special: bool) -> list[TextRun]:
        """Take the next token; return the runs that are certain now."""
        if special and self.stop is None:
            # What is open before the name ends here: a name begins with a whole character.
            before = self._detokenizer.pending.decode("utf-8", "replace")
            name = piece.decode("utf-8", "replace")
            self._names.append((len(self._text) + len(before), name))
        return self._runs(self._detokenizer.push(piece), is_all=self.stop is not None)

    def flush(self) -> list[TextRun]:
        """Return what was held back; nothing follows it."""
        return self._runs(self._detokenizer.flush(), is_all=True)

    def _runs(self, text: str, *, is_all: bool) -> list[TextRun]:
        """The runs that *text*, the next that is certain, completes."""
        if not self._names:
            return [TextRun(text, False)] if text else []
        text, begin = self._text + text, 0
        runs: list[TextRun] = []
        while self._names:
            start, name = self._names[0]
            if start + len(name) > len(text):
                break
            self._names.popleft()
            if start > begin:
                runs.append(TextRun(text[begin:start], False))
            runs.append(TextRun(name, True))
            begin = start + len(name)
        # A name that is certain in part waits for the rest of it. Where a stop string has cut
        # it, the part is text.
        if is_all:
            self._names.clear()
        end = min(self._names[0][0], len(text)) if self._names else len(text)
        if end > begin:
            runs.append(TextRun(text[begin:end], False))
        self._text = text[end:]
        self._names = deque((start - end, name) for start, name in self._names)
        return runs
