"""Reads a reply: what is reasoning, what content, and where calls begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyllama_raw.replies.calls import HEADER_LIMIT, CallReader
from pyllama_raw.replies.source import MARK, SPACE, Broken, Flow, Source
from pyllama_raw.replies.spec import ReplySpec
from pyllama_raw.replies.tables import Kind, Role, tables_of
from pyllama_raw.replies.typed import Schema
from pyllama_raw.replies.writer import Lead, Stretch, Writer


class ReplyReader:
    """
    Reads what comes into a source, and writes its parts.

    Args:
        tools: the schemas of the tools by their names; None where calls are text.
        new_id: makes the id of a call that has none.
    """

    def __init__(
        self,
        spec: ReplySpec,
        source: Source,
        writer: Writer,
        tools: Mapping[str, Schema] | None,
        new_id: Callable[[], str],
    ) -> None:
        self._spec = spec
        self._tables = tables_of(spec)
        self._source = source
        self._writer = writer
        self._new_id = new_id
        self._calls: CallReader | None = None
        if tools is not None and spec.calls:
            self._calls = CallReader(
                source, self._tables, tools, self._begin_call, writer.arguments
            )
        self._bare_calls = bool(self._calls and spec.calls and spec.calls.bare)
        self._trim = bool(spec.reasoning and spec.reasoning.trim)
        self._kinds = self._tables.kinds if self._calls else self._tables.without_calls
        self._kind = Kind.CONTENT
        self._stretch = self._text(Lead.KEPT)
        self._in_message = False
        self._between = True  # no call and no header is being read
        self._in_prompt = True
        self.flow = self._run()

    def end(self) -> None:
        """The reply is over, and so is its last text."""
        self._stretch.end(trim=False)

    def begin_after(self, prefix: str) -> None:
        """Begin where *prefix* ends, whose own text is no part of the reply; a call in it is."""
        self._kind = Kind.PLAIN if self._spec.messages else Kind.CONTENT
        special = self._tables.special.pattern
        self._source.add(special.sub(lambda found: MARK + found.group(), prefix))
        next(self.flow, None)
        self._source.drop()
        if self._between:
            held = self._source.take(len(self._source.text))
            found = self._kinds[self._kind].markers.pattern.match(held)
            self.flow = self._resume(found.group() if found else "")
            next(self.flow, None)
        self._writer.forget_text()
        self._in_prompt = False

    def _resume(self, marker: str) -> Flow[None]:
        """Go on after the prompt, at whose end *marker* stood: no longer one comes any more."""
        if marker:
            yield from self._act(self._kinds[self._kind].roles[marker], marker)
        thinks = self._kind is Kind.REASONING
        if self._spec.messages and not (marker or self._in_message or thinks):
            self._kind = Kind.HEADER
        if not self._stretch.blank:  # white space at its end was of the prompt
            self._stretch = (self._thought if thinks else self._text)(Lead.KEPT)
        yield from self._run()

    def _run(self) -> Flow[None]:
        """Read the reply."""
        if self._kind is Kind.HEADER:
            yield from self._header("")
        while True:
            if self._bare_calls and self._kind is Kind.CONTENT:
                yield from self._bare()
            table = self._kinds[self._kind]
            self._between = True
            marker = yield from self._source.until(table.markers, self._write)
            self._between = False
            if not marker:
                return
            yield from self._act(table.roles[marker], marker)

    def _act(self, role: Role, marker: str) -> Flow[None]:
        """Do what a delimiter does; where it does nothing, it is text."""
        if role in (Role.OPEN, Role.START) and self._calls:
            self._source.keep(marker)
            self._write((yield from self._calls.section(started=role is Role.START)))
        elif role is Role.MESSAGE:
            self._end(Kind.PLAIN, self._text(Lead.KEPT))
            yield from self._header(marker)
        elif role is Role.MESSAGE_END:
            self._in_message = False
            self._end(Kind.PLAIN, self._text(Lead.HELD))
        elif role is Role.THINK and self._may_think(marker):
            self._end(Kind.REASONING, self._thought(self._lead))
        elif role is Role.ANSWER and (
            self._kind is Kind.REASONING or self._stretch.blank or self._in_prompt
        ):
            self._end(Kind.CONTENT, self._text(self._lead))
        elif role is not Role.IGNORED:
            self._write(marker)

    def _may_think(self, marker: str) -> bool:
        """Whether reasoning may begin here; at its own beginning it is said twice."""
        if self._in_prompt:  # behind the header of the message
            return True
        anywhere = (
            self._spec.reasoning and self._spec.reasoning.anywhere
        ) or MARK in marker
        return self._stretch.blank or (
            bool(anywhere) and self._kind is not Kind.REASONING
        )

    def _header(self, marker: str) -> Flow[None]:
        """Read the header of a message, which says what the message is."""
        source = self._source
        source.keep(marker)
        self._kind = Kind.PLAIN
        try:
            header = yield from source.find(self._tables.middle, HEADER_LIMIT)
        except Broken:
            self._write(source.kept())
            return
        plain = header.replace(MARK, "")
        rules = ((rule.fullmatch(plain), kind) for rule, kind in self._tables.rules)
        found, kind = next(
            ((match, kind) for match, kind in rules if match), (None, None)
        )
        if not found or (kind == "call" and not self._calls):
            self._write(source.kept())
            return
        source.take(source.pos + len(header))
        yield from source.match(self._tables.middle)
        self._in_message = True
        if kind == "call" and self._calls and (name := found.groupdict().get("name")):
            self._write((yield from self._calls.named(name)))
            return
        source.drop()
        if kind == "reasoning":
            self._end(Kind.REASONING, self._thought(self._lead))
        elif kind == "call":
            self._kind = Kind.CONTENT

    def _bare(self) -> Flow[None]:
        """Read calls that no delimiter begins, where the text has not begun."""
        yield from self._source.run(SPACE, self._write)
        if not self._calls or not self._stretch.blank:
            return
        if (yield from self._source.peek()) in ("{", "["):
            self._source.keep()
            self._write((yield from self._calls.section(started=False, bare=True)))

    def _begin_call(self, name: str, id_: str | None) -> None:
        in_header = self._kind is Kind.PLAIN
        self._end(
            self._kind if in_header else Kind.CONTENT, self._text(Lead.HELD), call=True
        )
        self._writer.call(name, id_ or self._new_id())

    def _end(self, kind: Kind, stretch: Stretch, *, call: bool = False) -> None:
        """End a stretch of text, and begin the next."""
        trim = self._trim if Kind.REASONING in (kind, self._kind) else call
        self._stretch.end(trim=trim)
        self._kind = kind
        self._stretch = stretch

    def _write(self, text: str) -> None:
        self._stretch.write(text)

    def _text(self, lead: Lead) -> Stretch:
        calls = self._spec.calls
        trim_end = bool(self._calls and calls and calls.trim)
        return Stretch(self._writer.content, lead, trim_end=trim_end)

    @property
    def _lead(self) -> Lead:
        return Lead.DROPPED if self._trim else Lead.KEPT

    def _thought(self, lead: Lead) -> Stretch:
        return Stretch(self._writer.reasoning, lead, trim_end=self._trim)
