"""Reads calls that are objects of JSON."""

from __future__ import annotations

from collections.abc import Callable

from pyllama_raw.replies.json_text import pass_on, read_short, read_value, unquoted
from pyllama_raw.replies.source import Broken, Flow, TextSource, Write
from pyllama_raw.replies.spec import ObjectCall

TYPE = (
    "type"  # a key with the value `function`, as the objects have that describe tools
)


class CallObject:
    """
    An object that is a call, while it is read.

    Its arguments are passed on as they come if what belongs before them has come.

    Args:
        begin: takes the name of the call and the id that the text has for it.
        write: takes the next piece of its arguments.
    """

    def __init__(
        self,
        source: TextSource,
        layout: ObjectCall,
        begin: Callable[[str | None, str | None], None],
        write: Write,
    ) -> None:
        self._source, self._layout = source, layout
        self._begin, self._write = begin, write
        self._begun = False
        self._found: dict[str | None, str] = {}  # values by their keys
        self._arguments: list[str] = []  # that are held

    def read(self) -> Flow[None]:
        """Read all of it. Broken: it is no call, or none from here."""
        source = self._source
        yield from source.expect("{")
        empty = "{}"
        try:
            yield from source.space()
            while not (yield from source.next("}")):
                yield from self._entry()
                yield from source.space()
        except Broken:
            if self._begun or not self._is_cut():
                raise
            empty = ""
        if self._begun:
            source.drop()
        else:
            self._begin_call()
            self._write(unquoted("".join(self._arguments) or empty))

    def _begin_call(self) -> None:
        layout, found = self._layout, self._found
        self._begin(found.get(layout.name), layout.id and found.get(layout.id))
        self._begun = True

    def _entry(self) -> Flow[None]:
        """Read a key and its value. Broken: no call has it, or has it once more."""
        source, layout, found = self._source, self._layout, self._found
        if self._begun:
            source.keep()
        yield from source.next(",")
        yield from source.space()
        key = yield from read_short(source)
        known = (layout.name, layout.id, layout.arguments, TYPE)
        if found if layout.name is None else key in found or key not in known:
            raise Broken
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if layout.name is None or key == layout.arguments:
            found[None] = found[key] = key  # the name, where no other key has it
            yield from self._pass_arguments()
        elif key == layout.id and (yield from source.peek()) != '"':
            number: list[str] = []
            yield from read_value(source, number.append)
            found[key] = "".join(number)
        else:
            found[key] = yield from read_short(source)
            if found.get(TYPE, "function") != "function":
                raise Broken

    def _pass_arguments(self) -> Flow[None]:
        """Pass the arguments on if all that belongs before them has come, or hold them."""
        source, layout, found = self._source, self._layout, self._found
        has_head = found.get(layout.name) and (layout.id is None or layout.id in found)
        if has_head and (yield from source.peek()) == "{":
            self._begin_call()
            yield from pass_on(source, self._write)
        else:
            yield from read_value(source, self._arguments.append)

    def _is_cut(self) -> bool:
        """Whether the reply ends within an object that is a call so far."""
        source, layout = self._source, self._layout
        rest = source.text[source.pos :]
        keys = (layout.arguments, layout.id, layout.name)
        is_cut = source.ended and any(
            f'"{key}"'.startswith(rest) for key in keys if key
        )
        if is_cut:
            source.take(len(source.text))
        return is_cut
