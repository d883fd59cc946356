"""Reads calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyllama_raw.replies.json_text import read_short, read_value, unquoted
from pyllama_raw.replies.literals import read_literals
from pyllama_raw.replies.source import Broken, Flow, Source
from pyllama_raw.replies.spec import (
    CallsSpec,
    Headed,
    LiteralCall,
    ObjectCall,
    TaggedCall,
)
from pyllama_raw.replies.tables import Tables, matched
from pyllama_raw.replies.tagged import read_tagged
from pyllama_raw.replies.typed import Schema

HEADER_LIMIT = 256  # characters; what goes on for longer is no header


class CallReader:
    """
    Reads calls and gives them away as they come.

    What is read before the name of a call is certain is kept by the source. If it is no call, the
    source still has it.

    Args:
        begin: takes the name of a call and the id that the text has for it.
        write: takes the next piece of its arguments.
    """

    def __init__(
        self,
        source: Source,
        tables: Tables,
        tools: Mapping[str, Schema],
        begin: Callable[[str, str | None], None],
        write: Callable[[str], None],
    ) -> None:
        assert tables.spec.calls
        self._source = source
        self._tables = tables
        self._spec: CallsSpec = tables.spec.calls
        self._tools = tools
        self._begin_call = begin
        self._write = write
        self._known_only = False
        self._begun = False

    def section(self, *, started: bool, bare: bool = False) -> Flow[str]:
        """
        Read calls up to the first text that is none, and give the part of it that was taken.

        Args:
            started: the delimiter that the source keeps begins a call, not a section.
            bare: there is no delimiter, so only tools that are known are called.
        """
        source = self._source
        self._known_only = bare
        array: bool | None = False
        try:
            if not started:
                yield from source.space()
                array = yield from self._bracket("[")
                yield from self._started()
            while True:
                yield from self._call()
                array = yield from self._between(array)
                if array is None:
                    source.drop()
                    return ""
        except Broken:
            return source.kept()

    def named(self, name: str) -> Flow[str]:
        """Read the arguments of a call whose header the source keeps, as `section`."""
        self._known_only = self._spec.bare
        try:
            yield from self._json(name, None)
        except Broken:
            return self._source.kept()
        self._source.drop()
        return ""

    def _bracket(self, bracket: str) -> Flow[bool]:
        """Take a bracket around calls, in layouts that have them."""
        if not isinstance(self._spec.layout, (ObjectCall, LiteralCall)):
            return False
        found = yield from self._source.next(bracket)
        yield from self._source.space() if found else ()
        return found

    def _started(self) -> Flow[None]:
        """Take the start of a call, which some formats have."""
        if self._tables.starts and not (
            yield from self._source.match(self._tables.starts)
        ):
            raise Broken

    def _between(self, array: bool) -> Flow[bool | None]:
        """Read what is between two calls; None after the end of the section."""
        source, tables = self._source, self._tables
        source.keep()
        yield from source.space()
        if tables.ends and (yield from source.match(tables.ends)):
            source.keep()
            yield from source.space()
        if array and (yield from self._bracket("]")):
            array = False
            source.keep()
        if tables.closes and (yield from source.match(tables.closes)):
            return None
        separated = (yield from source.next(",")) or (yield from source.next(";"))
        yield from source.space()
        if isinstance(self._spec.layout, LiteralCall) and not (
            array or separated or tables.starts
        ):
            raise Broken
        yield from self._started()
        return array

    def _call(self) -> Flow[None]:
        """Read one call. Broken: it is none."""
        layout = self._spec.layout
        self._begun = False
        if isinstance(layout, ObjectCall):
            yield from self._object(layout)
            return
        fields = yield from self._header(layout)
        name, id = fields["name"], fields.get("id")
        try:
            if isinstance(layout, TaggedCall):
                self._begin(name, id)
                schema = self._tools.get(name, {})
                yield from read_tagged(self._source, self._tables, schema, self._write)
            elif isinstance(layout, LiteralCall):
                self._begin(name, id)
                yield from read_literals(self._source, self._tables, self._write)
            else:
                yield from self._json(name, id)
        except Broken:
            if not self._begun:
                raise

    def _header(self, layout: Headed) -> Flow[dict[str, str]]:
        source = self._source
        text = yield from source.find(self._tables.header_last, HEADER_LIMIT)
        fields = matched(self._tables.headers, text)
        if not fields:
            raise Broken
        if layout.header_is_id:
            fields["id"] = text.strip()
        source.take(source.pos + len(text))
        yield from source.match(self._tables.header_end)
        return fields

    def _begin(self, name: str, id: str | None) -> None:
        """This is a call: what was kept was its beginning."""
        if self._known_only and name not in self._tools:
            raise Broken
        self._source.drop()
        self._begun = True
        self._begin_call(name, id)

    def _json(self, name: str, id: str | None) -> Flow[None]:
        """Read arguments that are JSON. Broken: there are none, and nothing has begun."""
        source = self._source
        yield from source.space()
        char = yield from source.peek()
        if char == "{":
            self._begin(name, id)
            yield from self._passed()
        elif not char:
            self._begin(name, id)  # the reply is cut here
        elif self._tables.ends and (yield from source.match(self._tables.ends)):
            self._begin(name, id)
            self._write("{}")
        else:
            raise Broken

    def _passed(self) -> Flow[None]:
        """Pass on the arguments. Where they end too early, what follows is no part of them."""
        try:
            yield from read_value(self._source, self._write)
        except Broken:
            pass

    def _object(self, layout: ObjectCall) -> Flow[None]:
        """Read an object that is a call."""
        source = self._source
        if not (yield from source.next("{")):
            raise Broken
        name: str | None = None
        id: str | None = None
        held: list[str] = []
        try:
            while True:
                yield from source.space()
                if (yield from source.next("}")):
                    break
                yield from source.next(",")
                yield from source.space()
                key = yield from read_short(source)
                yield from source.space()
                if not (yield from source.next(":")):
                    raise Broken
                yield from source.space()
                if layout.name is None:
                    self._begin(key, None)
                    yield from self._passed()
                elif key == layout.name:
                    name = yield from read_short(source)
                elif key == layout.id:
                    id = yield from self._id()
                elif key != layout.arguments or self._begun:
                    raise Broken
                else:
                    if name is not None and (layout.id is None or id is not None):
                        streamed = (yield from source.peek()) == "{"
                        if streamed:
                            self._begin(name, id)
                            yield from self._passed()
                            continue
                    yield from read_value(source, held.append)
        except Broken:
            if self._begun:
                return
            if name is None or not self._cut(layout):
                raise
        if not self._begun and name is not None:
            self._begin(name, id)
            self._write(unquoted("".join(held)))

    def _id(self) -> Flow[str]:
        """The value of an id, which may be a number."""
        if (yield from self._source.peek()) == '"':
            return (yield from read_short(self._source))
        found: list[str] = []
        yield from read_value(self._source, found.append)
        return "".join(found)

    def _cut(self, layout: ObjectCall) -> bool:
        """Whether the reply ends within an object that is a call so far."""
        source = self._source
        rest = source.text[source.pos :]
        keys = [f'"{key}"' for key in (layout.arguments, layout.id, layout.name) if key]
        cut = source.ended and any(key.startswith(rest) for key in keys)
        if cut:
            source.take(len(source.text))
        return cut
