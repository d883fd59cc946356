"""Reads calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyllama_raw.replies.call import OpenCall, read_object
from pyllama_raw.replies.literals import read_literals
from pyllama_raw.replies.source import Broken, Flow, TextSource
from pyllama_raw.replies.spec import Headed, LiteralCall, ObjectCall, TaggedCall
from pyllama_raw.replies.tables import Tables, matched
from pyllama_raw.replies.tagged import read_tagged
from pyllama_raw.replies.typed import Schema

HEADER_LIMIT = 256  # characters; what goes on for longer is no header


class CallReader:
    """
    Reads calls and gives them away as they come.

    What is read before the name of a call is certain is kept by the source. If it is no call, the
    source still has it.
    """

    def __init__(
        self,
        source: TextSource,
        tables: Tables,
        tools: Mapping[str, Schema],
        begin: Callable[[str, str | None], None],
        write: Callable[[str], None],
    ) -> None:
        assert tables.calls
        self._source = source
        self._tables = tables
        self._layout = tables.calls.layout
        self._known_only = tables.calls.bare
        self._arrays = isinstance(self._layout, (ObjectCall, LiteralCall))
        self._in_array = False
        self._tools = tools
        self._call = OpenCall(source, begin, write, tools)

    def section(self, *, started: bool, bare: bool = False) -> Flow[str]:
        """
        Read calls up to the first text that is none, and give the part of it that was taken.

        Args:
            started: the delimiter that the source keeps begins a call, not a section.
            bare: there is no delimiter, so only tools that are known are called.
        """
        source = self._source
        self._call.known_only = bare
        self._in_array = False
        try:
            if not started:
                yield from source.space()
                self._in_array = yield from self._bracket("[")
                yield from self._start()
            yield from self._one()
            while (yield from self._another()):
                yield from self._one()
        except Broken:
            return source.kept()
        source.drop()
        return ""

    def named(self, name: str) -> Flow[str]:
        """Read the arguments of a call whose header the source keeps, as `section`."""
        self._call.begun = False
        self._call.known_only = self._known_only
        try:
            yield from self._json(name, None)
        except Broken:
            return self._source.kept()
        self._source.drop()
        return ""

    def _bracket(self, bracket: str) -> Flow[bool]:
        """Take a bracket around calls, in layouts that have them."""
        found = self._arrays and (yield from self._source.next(bracket))
        if found:
            yield from self._source.space()
        return found

    def _start(self) -> Flow[None]:
        """Take the start of a call, which some formats have."""
        if self._tables.starts and not (
            yield from self._source.match(self._tables.starts)
        ):
            raise Broken

    def _another(self) -> Flow[bool]:
        """Read what is between two calls; False after the end of the section."""
        source, tables = self._source, self._tables
        source.keep()
        yield from source.space()
        if (yield from source.match(tables.ends)):
            source.keep()
            yield from source.space()
        if self._in_array and (yield from self._bracket("]")):
            self._in_array = False
            source.keep()
        if (yield from source.match(tables.closes)) or source.cut(tables.closing):
            return False
        separated = (yield from source.next(",")) or (yield from source.next(";"))
        yield from source.space()
        if isinstance(self._layout, LiteralCall) and not (separated or tables.starts):
            raise Broken
        yield from self._start()
        return True

    def _one(self) -> Flow[None]:
        """Read one call. Broken: it is none, or none from here."""
        self._call.begun = False
        if isinstance(self._layout, ObjectCall):
            yield from read_object(self._call, self._layout)
        else:
            yield from self._headed(self._layout)

    def _headed(self, layout: Headed) -> Flow[None]:
        """Read a call that begins with a header."""
        source = self._source
        text = yield from source.find(self._tables.header_last, HEADER_LIMIT)
        fields = matched(self._tables.headers, text)
        if not fields:
            raise Broken
        source.take(source.pos + len(text))
        yield from source.match(self._tables.header_end)
        name, id_ = (
            fields["name"],
            text.strip() if layout.header_is_id else fields.get("id"),
        )
        if isinstance(layout, TaggedCall):
            self._call.begin(name, id_)
            yield from read_tagged(
                source, self._tables, self._tools.get(name, {}), self._call.write
            )
        elif isinstance(layout, LiteralCall):
            self._call.begin(name, id_)
            yield from read_literals(source, self._tables, self._call.write)
        else:
            yield from self._json(name, id_)

    def _json(self, name: str, id_: str | None) -> Flow[None]:
        """Read arguments that are JSON. Broken: there are none, and nothing has begun."""
        source = self._source
        yield from source.space()
        char = yield from source.peek()
        if char == "{":
            self._call.begin(name, id_)
            yield from self._call.pass_on()
        elif not char:
            self._call.begin(name, id_)  # the reply is cut here
        elif (yield from source.match(self._tables.ends)):
            self._call.begin(name, id_)
            self._call.write("{}")
        else:
            raise Broken
