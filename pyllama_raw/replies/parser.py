"""
Parts of a reply, and the parser that takes a reply apart into them while it is generated.

Parts are reasoning, content and calls, in the order in which the model wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any, Protocol
from uuid import uuid4

from pyllama_raw.replies.calls import CallReader
from pyllama_raw.replies.schemas import parameters_of
from pyllama_raw.replies.source import MARK, SPACE, Broken, Flow, TextSource, Write
from pyllama_raw.replies.spec import Kind, ReplySpec, Role, tables_of


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str
    """The new text, never empty."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str
    """The new text, never empty."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """
    A piece of the call of a tool.

    The first piece of a call has its id and its name, once; the pieces of arguments that follow
    are JSON when they are put together.
    """

    index: int
    """The number of the call in its reply, from 0."""
    id: str | None = None
    """The id of the call; None after the first piece."""
    name: str | None = None
    """The name of the tool; None after the first piece."""
    arguments: str = ""
    """The next piece of the arguments."""


Part = Content | Reasoning | CallDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written."""

    id: str
    """An id that its result is given with."""
    name: str
    """The name of the tool."""
    arguments: str
    """The arguments as JSON; cut off if the reply was."""

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are JSON; else the reply was cut, or the model is wrong."""
        return is_json(self.arguments)


def is_json(text: str) -> bool:
    """Whether *text* is one value of JSON."""
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return True


def _refused(constant: str) -> object:
    raise ValueError(constant)  # NaN and infinity, which JSON has not


def text_of(parts: Iterable[Part], kind: type[Content] | type[Reasoning]) -> str:
    """The text of all *parts* of this kind."""
    return "".join(part.text for part in parts if isinstance(part, kind))


def calls_of(parts: Iterable[Part]) -> tuple[ToolCall, ...]:
    """The calls that *parts* make up, by index."""
    calls: dict[int, list[CallDelta]] = {}
    for part in parts:
        if isinstance(part, CallDelta):
            calls.setdefault(part.index, []).append(part)
    return tuple(
        ToolCall(
            id="".join(delta.id or "" for delta in deltas),
            name="".join(delta.name or "" for delta in deltas),
            arguments="".join(delta.arguments for delta in deltas),
        )
        for _, deltas in sorted(calls.items())
    )


def merged(parts: Iterable[Part]) -> list[Part]:
    """*parts* with one in the place of neighbours of a kind, or of a call."""
    joined: list[Part] = []
    for _, neighbours in groupby(parts, _kind):
        first, *following = neighbours
        if isinstance(first, CallDelta):
            arguments = "".join(map(_text, following))
            joined.append(replace(first, arguments=first.arguments + arguments))
        else:
            text = "".join(map(_text, following))
            joined.append(replace(first, text=first.text + text))
    return joined


def _kind(part: Part) -> tuple[type, int | None]:
    return type(part), part.index if isinstance(part, CallDelta) else None


def _text(part: Part) -> str:
    return part.arguments if isinstance(part, CallDelta) else part.text


class ReplyParser:
    """
    Takes one reply apart while it is generated.

    All that is generated is in its parts, but for delimiters: what is no call is content. However
    the text is cut into pieces, the parts say the same when they are put together.

    Args:
        spec: how the model writes. `spec.bound(is_special)` says which of its delimiters are
            special tokens; in one that is not bound, all delimiters are matched as text.
        tools: the tools of the request, as OpenAI's API has them. They give the types of
            arguments; calls without a delimiter are known by their names alone.
        prefix: the end of the prompt after its last message, which may begin reasoning.
        calls: whether calls are taken out; without, they are text of the content.
        search: looks for stop strings, in content only: neither in reasoning nor in calls. The
            reply ends before the first.
        is_formed: a constraint says what the content is. Once it has begun, all that follows is
            content, whatever delimiters it spells.
        keeps_space: white space that content begins with belongs to it.
        new_id: makes the id of a call in formats that write none.
    """

    def __init__(
        self,
        spec: ReplySpec,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: str = "",
        calls: bool = True,
        search: StopSearch | None = None,
        is_formed: bool = False,
        keeps_space: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        # Without calls their delimiters are text like any other.
        if not calls:
            spec = spec.model_copy(update={"calls": None})
        self._spec, self._tables = spec, tables_of(spec)
        self._source, self._writer = TextSource(), PartWriter()
        self._search, self._is_formed = search, is_formed
        self._keeps_space = keeps_space
        self._new_id = new_id or id_maker(spec)
        self._calls: CallReader | None = None
        if spec.calls:
            self._calls = CallReader(
                self._source,
                self._tables,
                spec.calls,
                dict(map(parameters_of, tools)),
                begin=self._begin_call,
                write=self._writer.arguments,
            )
        self._bare_calls = bool(spec.calls and spec.calls.bare)
        self._trim = bool(spec.reasoning and spec.reasoning.trim)
        self._lead = Lead.DROPPED if self._trim else Lead.KEPT
        self._kinds = self._tables.kinds
        self._kind = Kind.PLAIN if spec.messages else Kind.CONTENT
        self._stretch = self._new_stretch(Lead.KEPT)
        self._in_message = False
        self._between = True  # no call and no header is being read
        self._flow = self._run()
        self._in_prompt = True
        self._begin_after(prefix)
        self._in_prompt = False

    def feed(self, text: str, special: bool = False) -> list[Part]:
        """
        The parts that *text*, the next of the reply, adds.

        Args:
            text: the next text, or with *special* the name of one special token in `spec.special`.
            special: *text* is such a token. Other tokens are fed as the text that they show.
        """
        if self.is_stopped:
            return []
        # Most text has no delimiter: none begins in it, and none has begun before.
        is_within = self._between and not (special or self._stretch.blank)
        firsts = self._kinds[self._kind].first
        if is_within and self._source.is_empty and firsts.isdisjoint(text):
            with suppress(Stopped):
                self._write(text)
            return self._writer.taken()
        text = text.replace(MARK, "\ufffd")
        is_mark = special and text in self._spec.special
        self._source.add(MARK + text if is_mark else text)
        with suppress(Stopped):
            next(self._flow, None)
        return self._writer.taken()

    def finish(self) -> list[Part]:
        """The parts that the end of the reply adds. A call that is cut keeps what it has."""
        self._source.ended = True
        with suppress(Stopped):
            next(self._flow, None)
            self._write_pending()
        self._stretch.end(trim=False)
        return self._writer.taken()

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the content."""
        return self._search is not None and self._search.stop is not None

    @property
    def is_in_content(self) -> bool:
        """Whether what comes next is content, unless it is a delimiter."""
        return self._between and self._kind is not Kind.REASONING

    def _begin_after(self, prefix: str) -> None:
        """Begin where *prefix* ends, whose own text is no part of the reply; a call in it is."""
        self._source.add(*self._tables.marked([prefix]))
        next(self._flow, None)
        self._source.drop()
        # The prompt may end within a delimiter that the reply completes, as "<think" before ">".
        if self._between:
            tail = self._source.take(len(self._source.text))
            match = self._kinds[self._kind].pattern.match(tail)
            self._flow = self._resume(match.group() if match else "")
            next(self._flow, None)
        self._writer.forget_text()

    def _resume(self, marker: str) -> Flow[None]:
        """Go on after the prompt, at whose end *marker* stood: no longer one comes any more."""
        if marker:
            yield from self._act(self._kinds[self._kind].roles[marker], marker)
        # A format of messages begins each with a header; the prompt may have written it.
        has_begun = marker or self._in_message or self._kind is Kind.REASONING
        if not self._stretch.blank or self._keeps_space:
            # White space at the end of the prompt belongs to it.
            self._stretch = self._new_stretch(Lead.KEPT)
        if self._spec.messages and not has_begun:
            yield from self._header("")
        yield from self._run()

    def _run(self) -> Flow[None]:
        """Read the reply."""
        while True:
            # Calls without a delimiter stand where content would begin, and nowhere else.
            if self._bare_calls and self._kind is Kind.CONTENT:
                yield from self._bare()
            table = self._kinds[self._kind]
            self._between = True
            marker = yield from self._source.until(table, self._write)
            self._between = False
            if not marker:
                return
            role = table.roles[marker]
            # Content that has a form may spell any delimiter, as text in a string of JSON.
            if self._is_formed and self._has_begun(role) and MARK not in marker:
                self._kind = Kind.FORMED
                self._write(marker)
            else:
                yield from self._act(role, marker)

    def _act(self, role: Role, marker: str) -> Flow[None]:
        """Do what a delimiter does; where it does nothing, it is text."""
        if role in (Role.OPEN, Role.START) and self._calls:
            # Calls: the source keeps what they take, because they may turn out to be text.
            self._source.keep(marker)
            yield from self._read(self._calls.section(started=role is Role.START))
        elif role is Role.MESSAGE:
            # Another message, whose header says what it is.
            self._end(Kind.PLAIN, Lead.KEPT)
            yield from self._header(marker)
        elif role is Role.MESSAGE_END:
            self._in_message = False
            self._end(Kind.PLAIN, Lead.HELD)
        elif role is Role.THINK and self._may_think(marker):
            # Thoughts begin.
            self._end(Kind.REASONING, self._lead)
        elif role is Role.ANSWER and (
            self._kind is Kind.REASONING or self._is_blank or self._in_prompt
        ):
            # Thoughts end, or there were none: a model may write only their end.
            self._end(Kind.CONTENT, self._lead)
        elif role is not Role.IGNORED:
            # The delimiter does nothing here, so the model meant its text.
            self._write(marker)

    @property
    def _is_blank(self) -> bool:
        """Whether this stretch of text has only white space so far."""
        pending = self._search.pending.strip() if self._search else b""
        return self._stretch.blank and not pending

    def _has_begun(self, role: Role) -> bool:
        """Whether this stretch is content that has begun, where a delimiter of *role* comes."""
        if self._kind is Kind.REASONING or self._in_prompt:
            return False
        # Lines stand between thoughts and calls, so white space alone does not decide for content.
        if not self._is_blank or role in (Role.OPEN, Role.START):
            return not self._is_blank
        return self._keeps_space and not self._stretch.is_empty

    def _may_think(self, marker: str) -> bool:
        """Whether reasoning may begin here; at its own beginning it is said twice."""
        if self._is_blank or self._in_prompt:  # behind the header of the message
            return True
        reasoning = self._spec.reasoning
        anywhere = MARK in marker or bool(reasoning and reasoning.anywhere)
        return anywhere and self._kind is not Kind.REASONING

    def _header(self, marker: str) -> Flow[None]:
        """Read the header of a message, which says what the message is."""
        source, messages = self._source, self._spec.messages
        source.keep(marker)
        self._kind = Kind.PLAIN
        try:
            header = yield from source.find(self._tables.middle)
        except Broken:
            # No header ends here: all of it is text.
            self._write(source.kept())
            return
        match = messages and messages.rule_of(header.replace(MARK, ""))
        kind = match and match[0].kind
        if not match or (kind == "call" and not self._calls):
            # A header that no rule knows is text, and so is that of a call if there are none.
            self._write(source.kept())
            return
        source.take(source.pos + len(header))
        yield from source.match(self._tables.middle)
        self._in_message = True
        name = match[1].groupdict().get("name")
        if kind == "call" and self._calls and name:
            # The header has the name, and the message is the arguments.
            yield from self._read(self._calls.named(name))
            return
        source.drop()
        if kind == "reasoning":
            self._end(Kind.REASONING, self._lead)
        elif kind == "call":
            self._kind = Kind.CONTENT

    def _bare(self) -> Flow[None]:
        """Read calls that no delimiter begins, where the text has not begun."""
        yield from self._source.run(SPACE, self._write)
        if not self._calls or not self._is_blank:
            return
        if (yield from self._source.peek()) in ("{", "["):
            self._source.keep()
            yield from self._read(self._calls.section(started=False, bare=True))

    def _read(self, calls: Flow[None]) -> Flow[None]:
        """Read *calls*; what the source has kept for them and is none is text."""
        try:
            yield from calls
        except Broken:
            self._write(self._source.kept())
        self._source.drop()

    def _begin_call(self, name: str, id_: str | None) -> None:
        kind = Kind.PLAIN if self._kind is Kind.PLAIN else Kind.CONTENT
        self._end(kind, Lead.HELD, call=True)
        self._writer.call(name, id_ or self._new_id())

    def _end(self, kind: Kind, lead: Lead, *, call: bool = False) -> None:
        """End a stretch of text, and begin the next."""
        trim = self._trim if Kind.REASONING in (kind, self._kind) else call
        self._write_pending()
        self._stretch.end(trim=trim)
        self._kind = kind
        is_kept = self._keeps_space and kind is not Kind.REASONING
        self._stretch = self._new_stretch(Lead.KEPT if is_kept else lead)

    def _new_stretch(self, lead: Lead) -> TextStretch:
        thinks, calls = self._kind is Kind.REASONING, self._spec.calls
        write = partial(self._writer.add, Reasoning if thinks else Content)
        trim_end = self._trim if thinks else bool(calls and calls.trim)
        return TextStretch(write, lead, trim_end=trim_end)

    def _write(self, text: str) -> None:
        """More of the stretch. Stopped: it ends before a stop string."""
        search = self._search
        # Stop strings count in content only.
        if search is None or self._kind is Kind.REASONING or self._in_prompt:
            self._stretch.write(text)
            return
        self._stretch.write(search.push(text.replace(MARK, "").encode()))
        if search.stop is not None:
            raise Stopped

    def _write_pending(self) -> None:
        if self._search is not None and (text := self._search.flush()):
            self._stretch.write(text)


def parts_of(spec: ReplySpec, text: str, **options: Any) -> list[Part]:
    """The parts of the whole reply *text*; see `ReplyParser` for *options*."""
    parser = ReplyParser(spec, **options)
    fed = [parser.feed(*piece) for piece in spec.pieces(text)]
    return [part for parts in (*fed, parser.finish()) for part in parts]


def id_maker(spec: ReplySpec) -> Callable[[], str]:
    """Makes ids as the models of *spec* take them."""
    length = spec.calls and spec.calls.id_length
    if length:
        return lambda: uuid4().hex[:length]
    return lambda: f"call_{uuid4().hex[:24]}"


# -- from text to parts ------------------------------------------------------------------


class Lead(Enum):
    """Fate of white space at the beginning of a stretch of text."""

    KEPT = "kept"
    DROPPED = "dropped"
    HELD = "held"  # kept if text follows


class Stopped(Exception):
    """Sign that the content ends here: a stop string has come."""


class StopSearch(Protocol):
    """Looks for stop strings in a text."""

    stop: bytes | None  # the one that was met: nothing follows the text before it

    @property
    def pending(self) -> bytes:
        """Bytes that are held back."""

    def push(self, piece: bytes) -> str:
        """Take the next piece; return the text that is certain now."""

    def flush(self) -> str:
        """Return what was held back; what follows is looked at anew."""


class TextStretch:
    """A stretch of text between delimiters, to which white space beside them may belong."""

    def __init__(self, write: Write, lead: Lead, *, trim_end: bool) -> None:
        self._write = write
        self._lead = lead
        self._trim_end = trim_end
        self._space: list[str] = []
        self.blank = True

    @property
    def is_empty(self) -> bool:
        """Whether not even white space has come."""
        return self.blank and not self._space

    def write(self, text: str) -> None:
        if self.blank and self._lead is Lead.DROPPED:
            text = text.lstrip()
        # White space waits if it may be the end of the stretch, or all of it.
        body = text.rstrip()
        if not self._trim_end and (body or not self.blank):
            body = text
        if body:
            self._write("".join([*self._space, body]))
            self._space.clear()
            self.blank = False
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def end(self, *, trim: bool) -> None:
        """The stretch is over; with *trim* white space at its end belongs to what follows."""
        if not trim and self._space and not (self.blank and self._lead is Lead.HELD):
            self._write("".join(self._space))
        self._space.clear()


class PartWriter:
    """Collects parts; neighbours that go on are one part."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._texts: list[str] = []
        self._make: Callable[[str], Part] = Content
        self._n_calls = 0

    def taken(self) -> list[Part]:
        """The parts since the last time."""
        self._flush(self._make)
        parts, self._parts = self._parts, []
        return parts

    def forget_text(self) -> None:
        """Only calls are left of what was written."""
        self._parts = [part for part in self.taken() if isinstance(part, CallDelta)]

    def add(self, make: Callable[[str], Part], text: str) -> None:
        """More of the text of a part, which *make* makes."""
        if make is not self._make:
            self._flush(make)
        self._texts.append(text)

    def call(self, name: str, id_: str) -> None:
        index = self._n_calls
        self._n_calls += 1
        self._flush(partial(CallDelta, index, None, None))
        self._parts.append(CallDelta(index, id_, name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the last call."""
        self._texts.append(text)

    def _flush(self, make: Callable[[str], Part]) -> None:
        """Make a part of what there is; the next is made by *make*."""
        if text := "".join(self._texts).replace(MARK, ""):
            self._parts.append(self._make(text))
        self._texts.clear()
        self._make = make
