"""Reads calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyllama_raw.replies.json_text import pass_on
from pyllama_raw.replies.literals import read_literals
from pyllama_raw.replies.objects import CallObject
from pyllama_raw.replies.source import Broken, Flow, TextSource, Write
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


class CallReader:
    """
    Reads calls and gives them away as they come.

    What is read before the name of a call is certain is kept by the source. If it is no call, the
    source still has it.

    Args:
        tools: the schemas of the tools by their names.
        begin: takes the name of a call and the id that the text has for it.
        write: takes the next piece of its arguments.
    """

    def __init__(
        self,
        source: TextSource,
        tables: Tables,
        calls: CallsSpec,
        tools: Mapping[str, Schema],
        *,
        begin: Callable[[str, str | None], None],
        write: Write,
    ) -> None:
        self._source, self._tables = source, tables
        self._layout, self._is_bare = calls.layout, calls.bare
        self._known_only = False
        self._in_array = False
        self._tools = tools
        self._begin_known, self._write = begin, write

    def section(self, *, started: bool, bare: bool = False) -> Flow[None]:
        """
        Read calls up to the first text that is none. Broken: what the source keeps is none.

        Args:
            started: the delimiter that the source keeps begins a call, not a section.
            bare: there is no delimiter, so only tools that are known are called.
        """
        self._known_only = bare
        self._in_array = False
        if not started:
            yield from self._source.space()
            self._in_array = yield from self._bracket("[")
            yield from self._start()
        yield from self._one()
        while (yield from self._another()):
            yield from self._one()

    def named(self, name: str) -> Flow[None]:
        """Read the arguments of a call whose header the source keeps, as `section`."""
        self._known_only = self._is_bare
        yield from self._json(name, None)

    def _begin(self, name: str | None, id_: str | None) -> None:
        """
        This is a call: what the source keeps was its beginning.

        Raises:
            Broken: a call needs a name, and one without a delimiter that of a tool.
        """
        if not name or (self._known_only and name not in self._tools):
            raise Broken
        self._source.drop()
        self._begin_known(name, id_)

    def _bracket(self, bracket: str) -> Flow[bool]:
        """Take a bracket around calls, in layouts that have them."""
        has_arrays = isinstance(self._layout, ObjectCall | LiteralCall)
        found = has_arrays and (yield from self._source.next(bracket))
        if found:
            yield from self._source.space()
        return found

    def _start(self) -> Flow[None]:
        """Take the start of a call, which some formats have."""
        starts = self._tables.starts
        if starts and not (yield from self._source.match(starts)):
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
        if isinstance(layout := self._layout, ObjectCall):
            call = CallObject(self._source, layout, self._begin, self._write)
            yield from call.read()
        else:
            yield from self._headed(layout)

    def _headed(self, layout: Headed) -> Flow[None]:
        """Read a call that begins with a header."""
        source, tables = self._source, self._tables
        text = yield from source.find(tables.header_last)
        fields = matched(tables.headers, text)
        if not fields:
            raise Broken
        source.take(source.pos + len(text))
        yield from source.match(tables.header_end)
        name = fields["name"]
        id_ = text.strip() if layout.header_is_id else fields.get("id")
        if not isinstance(layout, TaggedCall | LiteralCall):
            yield from self._json(name, id_)
            return
        self._begin(name, id_)
        if isinstance(layout, TaggedCall):
            schema = self._tools.get(name, {})
            yield from read_tagged(source, tables, layout, schema, self._write)
        else:
            yield from read_literals(source, tables, layout, self._write)

    def _json(self, name: str, id_: str | None) -> Flow[None]:
        """Read arguments that are JSON. Broken: there are none, and nothing has begun."""
        source = self._source
        yield from source.space()
        char = yield from source.peek()
        if char not in ("{", "") and not (yield from source.match(self._tables.ends)):
            raise Broken
        self._begin(name, id_)
        if char == "{":
            yield from pass_on(source, self._write)
        elif char:  # an empty char: the reply is cut here
            self._write("{}")
