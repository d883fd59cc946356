"""The call that is being read, in formats whose arguments are JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from pyllama_raw.replies.json_text import read_short, read_value, unquoted
from pyllama_raw.replies.source import Broken, Flow, TextSource
from pyllama_raw.replies.spec import ObjectCall

TYPE = (
    "type"  # a key with the value `function`, as the objects have that describe tools
)


class OpenCall:
    """
    The call that is being read.

    Args:
        begin: takes the name of a call and the id that the text has for it.
        write: takes the next piece of its arguments.
        known: the names of the tools of the request.
    """

    def __init__(
        self,
        source: TextSource,
        begin: Callable[[str, str | None], None],
        write: Callable[[str], None],
        known: Container[str],
    ) -> None:
        self.source = source
        self.write = write
        self.begun = False
        self.known_only = False
        self._begin = begin
        self._known = known

    def begin(self, name: str | None, id_: str | None) -> None:
        """
        This is a call: what the source keeps was its beginning.

        Raises:
            Broken: a call needs a name, and one without a delimiter that of a tool.
        """
        if not name or (self.known_only and name not in self._known):
            raise Broken
        self.source.drop()
        self.begun = True
        self._begin(name, id_)

    def pass_on(self) -> Flow[None]:
        """Pass on arguments. Where they break off, what follows is no part of them."""
        with contextlib.suppress(Broken):
            yield from read_value(self.source, self.write)


@dataclass
class Entries:
    """Entries of an object that have been read."""

    name: str | None = None
    id: str | None = None
    arguments: list[str] = field(default_factory=list)


def read_object(call: OpenCall, layout: ObjectCall) -> Flow[None]:
    """
    Read an object that is a call.

    Its arguments are passed on as they come if what belongs before them has come.
    """
    source = call.source
    entries = Entries()
    yield from source.expect("{")
    try:
        yield from source.space()
        while not (yield from source.next("}")):
            yield from _entry(call, layout, entries)
            yield from source.space()
    except Broken:
        if call.begun or not _cut(source, layout):
            raise
        text = "".join(entries.arguments)
    else:
        text = "".join(entries.arguments) or "{}"
    if call.begun:
        source.drop()
    else:
        call.begin(entries.name, entries.id)
        call.write(unquoted(text))


def _entry(call: OpenCall, layout: ObjectCall, entries: Entries) -> Flow[None]:
    """Read a key and its value. Broken: no call has it, or has it once more."""
    source = call.source
    if call.begun:
        source.keep()
    yield from source.next(",")
    yield from source.space()
    key = yield from read_short(source)
    if not _has_place(key, call, layout, entries):
        raise Broken
    yield from source.space()
    yield from source.expect(":")
    yield from source.space()
    if layout.name is None:
        call.begin(key, None)
        yield from call.pass_on()
    elif key == layout.name:
        entries.name = yield from read_short(source)
    elif key == layout.id:
        entries.id = yield from _id(source)
    elif key == layout.arguments:
        yield from _arguments(call, layout, entries)
    elif (yield from read_short(source)) != "function":
        raise Broken


def _arguments(call: OpenCall, layout: ObjectCall, entries: Entries) -> Flow[None]:
    """Pass the arguments on if all that belongs before them has come, or hold them."""
    complete = entries.name and (layout.id is None or entries.id is not None)
    if complete and (yield from call.source.peek()) == "{":
        call.begin(entries.name, entries.id)
        yield from call.pass_on()
    else:
        yield from read_value(call.source, entries.arguments.append)


def _has_place(key: str, call: OpenCall, layout: ObjectCall, entries: Entries) -> bool:
    """Whether an object of a call may have *key* now."""
    if layout.name is None:
        return not call.begun
    if key == layout.arguments:
        return not call.begun and not entries.arguments
    found = {layout.name: entries.name, layout.id: entries.id, TYPE: None}
    return key in found and found[key] is None


def _id(source: TextSource) -> Flow[str]:
    """The value of an id, which may be a number."""
    if (yield from source.peek()) == '"':
        return (yield from read_short(source))
    found: list[str] = []
    yield from read_value(source, found.append)
    return "".join(found)


def _cut(source: TextSource, layout: ObjectCall) -> bool:
    """Whether the reply ends within an object that is a call so far."""
    rest = source.text[source.pos :]
    keys = (layout.arguments, layout.id, layout.name)
    cut = source.ended and any(f'"{key}"'.startswith(rest) for key in keys if key)
    if cut:
        source.take(len(source.text))
    return cut
