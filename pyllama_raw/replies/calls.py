"""
Calls of tools, read as they come in any of the layouts of a specification.

A call is an object of JSON, or a header with arguments behind it: JSON, text between tags, or
literals. All arguments become JSON, and are passed on as soon as they are certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from pyllama_raw.replies.schemas import (
    Schema,
    items_of,
    property_of,
    types_of,
    value_of,
)
from pyllama_raw.replies.source import (
    MARK,
    Broken,
    Delimiters,
    Flow,
    TextSource,
    Write,
    pass_on,
    quoted,
    read_short,
    read_value,
    unquoted,
)
from pyllama_raw.replies.spec import (
    CallsSpec,
    Headed,
    LiteralCall,
    ObjectCall,
    Tables,
    TaggedCall,
    matched,
)


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
        # A section may be an array of calls, and each may have a start of its own.
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
        has_bracket = has_arrays and (yield from self._source.next(bracket))
        if has_bracket:
            yield from self._source.space()
        return has_bracket

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
        # The end of the last call, then of the array, then of the section. What is taken of
        # them is no text, so the source keeps only what follows.
        if (yield from source.match(tables.ends)):
            source.keep()
            yield from source.space()
        if self._in_array and (yield from self._bracket("]")):
            self._in_array = False
            source.keep()
        if (yield from source.match(tables.closes)) or source.cut(tables.closing):
            return False
        # Another call follows, or text; literals need a comma between two calls.
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
        # The header ends where its own end, a parameter or the end of the call begins.
        text = yield from source.find(tables.header_last)
        fields = matched(tables.headers, text)
        if not fields:
            raise Broken
        source.take(source.pos + len(text))
        yield from source.match(tables.header_end)
        # The name is certain, so arguments can be passed on as they come.
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


# -- objects of JSON ---------------------------------------------------------------------

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
        self._has_begun = False
        self._values: dict[str | None, str] = {}  # values by their keys
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
            # A reply that ends within an object has a call as far as it goes.
            if self._has_begun or not self._is_cut():
                raise
            empty = ""
        if self._has_begun:
            source.drop()
        else:
            arguments = unquoted("".join(self._arguments))
            # Some models write null or an empty text for no arguments.
            if arguments.strip() in ("", "null"):
                arguments = empty
            self._begin_call()
            self._write(arguments)

    def _begin_call(self) -> None:
        layout, values = self._layout, self._values
        self._begin(values.get(layout.name), layout.id and values.get(layout.id))
        self._has_begun = True

    def _entry(self) -> Flow[None]:
        """Read a key and its value. Broken: no call has it, or has it once more."""
        source, layout, values = self._source, self._layout, self._values
        if self._has_begun:
            source.keep()
        yield from source.next(",")
        yield from source.space()
        key = yield from read_short(source)
        # Any other key, or one that comes twice, makes the object no call.
        keys = (layout.name, layout.id, layout.arguments, TYPE)
        if values if layout.name is None else key in values or key not in keys:
            raise Broken
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if layout.name is None or key == layout.arguments:
            values[None] = values[key] = key  # the name, where no other key has it
            yield from self._pass_arguments()
        elif key == layout.id and (yield from source.peek()) != '"':
            # Some models write ids as numbers.
            number: list[str] = []
            yield from read_value(source, number.append)
            values[key] = "".join(number)
        else:
            values[key] = yield from read_short(source)
            if values.get(TYPE, "function") != "function":
                raise Broken

    def _pass_arguments(self) -> Flow[None]:
        """Pass the arguments on if all that belongs before them has come, or hold them."""
        source, layout, values = self._source, self._layout, self._values
        has_head = values.get(layout.name) and (
            layout.id is None or layout.id in values
        )
        if has_head and (yield from source.peek()) == "{":
            self._begin_call()
            yield from pass_on(source, self._write)
        else:
            yield from read_value(source, self._arguments.append)

    def _is_cut(self) -> bool:
        """Whether the reply ends within an object that is a call so far."""
        source, layout = self._source, self._layout
        unread = source.text[source.pos :]
        keys = (layout.arguments, layout.id, layout.name)
        is_cut = source.ended and any(
            f'"{key}"'.startswith(unread) for key in keys if key
        )
        if is_cut:
            source.take(len(source.text))
        return is_cut


# -- text between tags -------------------------------------------------------------------

TYPES_OF_STRING = ("string", "true")
STRING = frozenset({"string"})
MAX_DEPTH = 32  # of values whose own entries are between tags


def read_tagged(
    source: TextSource,
    tables: Tables,
    layout: TaggedCall,
    schema: Schema,
    write: Write,
) -> Flow[None]:
    """
    Read parameters up to the end of their call.

    A parameter that is a string is passed on as it comes, others when they end.
    """
    comma = ""
    write("{")
    while True:
        source.keep()
        yield from source.space()
        tag = yield from source.match(tables.parameter)
        if tag not in tables.parameter_starts:
            # The end of the call; a reply that ends here leaves its JSON open.
            write("}" if tag or not source.cut(tables.parameter) else "")
            return
        try:
            text = yield from source.find(tables.middle_of_parameter)
        except Broken:
            text = ""
        fields = matched(tables.keys, text)
        if not fields:
            # No key as its form has it: the call ends before, and the rest is text.
            write("" if source.ended else "}")
            raise Broken
        source.take(source.pos + len(text))
        yield from source.match(tables.middle_of_parameter)
        source.drop()
        write(f'{comma}"{quoted(fields["key"])}": ')
        comma = ", "
        value = _parameter(source, tables, layout, fields, schema, write=write)
        if not (yield from value):
            return


def _parameter(
    source: TextSource,
    tables: Tables,
    layout: TaggedCall,
    fields: dict[str, str],
    schema: Schema,
    *,
    write: Write,
) -> Flow[bool]:
    """Read the value of one parameter; False where the reply ends within it."""
    of_key = property_of(schema, fields["key"], schema)
    types = types_of(of_key, schema)
    if "type" in fields:
        types = STRING if fields["type"] in TYPES_OF_STRING else frozenset()
    ends = tables.value_ends(fields["key"])
    quote = yield from source.match(tables.quotes)
    inner = Delimiters([dict(layout.quotes)[quote]]) if quote else ends
    if types == STRING:
        # A string is passed on as it comes, because any text is one.
        write('"')
        end = yield from source.until(inner, lambda text: write(quoted(text)))
        write('"' if end else "")
    else:
        # The type of any other value is certain only with its end.
        texts: list[str] = []
        end = yield from source.until(inner, texts.append)
        text = "".join(texts).replace(MARK, "")
        write(_nested(text, layout, of_key, schema) if end else text)
    if quote:
        yield from source.space()
        yield from source.match(ends)
    return bool(end)


def _nested(
    text: str, layout: TaggedCall, schema: Schema, root: Schema, depth: int = 0
) -> str:
    """*text* as JSON. What is allowed to be a string has no entries of its own."""
    types = types_of(schema, root)
    has_entries = layout.nested and depth < MAX_DEPTH and "string" not in types
    entries = _entries(text.strip(), layout) if has_entries else ()
    if not entries:
        return value_of(text, types)
    is_array = "array" in types or (
        "object" not in types and {key for key, _ in entries} == {"item"}
    )
    items = items_of(schema, root)
    values: list[str] = []
    for key, value in entries:
        of_key = items if is_array else property_of(schema, key, root)
        label = "" if is_array else f'"{quoted(key)}": '
        values.append(label + _nested(value, layout, of_key, root, depth + 1))
    inside = ", ".join(values)
    return f"[{inside}]" if is_array else f"{{{inside}}}"


def _entries(text: str, layout: TaggedCall) -> list[tuple[str, str]]:
    """The keys and values of *text*; none if it is anything else."""
    begin, middle = layout.start[0], layout.middle[0]
    entries: list[tuple[str, str]] = []
    while text:
        key, _, tail = text.removeprefix(begin).partition(middle)
        opening, closing = begin + key + middle, layout.end[0].replace("{key}", key)
        if not text.startswith(opening):
            return []
        depth = 1
        for tag in re.finditer(f"({re.escape(opening)})|{re.escape(closing)}", tail):
            depth += 1 if tag[1] else -1
            if not depth:
                break
        else:
            return []
        entries.append((key, tail[: tag.start()]))
        text = tail[tag.end() :].lstrip()
    return entries


# -- literals of Python, or alike --------------------------------------------------------

WORD = re.compile(rf"""[^\s=:,(){{}}\[\]"'{MARK}]+""")
BRACKETS = {"{": ("}", "}"), "[": ("]", "]"), "(": (")", "]")}  # JSON has no tuples
ESCAPES = {"a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "'": "'", "\n": ""}
CODES = {"x": 2, "u": 4, "U": 8}  # digits of the code of a character
OBJECT = "}"


def read_literals(
    source: TextSource, tables: Tables, layout: LiteralCall, write: Write
) -> Flow[None]:
    """
    Read from after the bracket before the arguments to the bracket after them.

    Broken: what follows are no literals, or the reply ends within them.
    """
    closing: list[tuple[str, str]] = [(layout.close, OBJECT)]
    empty = True  # nothing is in the innermost brackets
    write("{")
    while closing:
        yield from source.space()
        end, json_end = closing[-1]
        # The innermost bracket ends.
        if (yield from source.next(end)):
            write(json_end)
            closing.pop()
            empty = False
            continue
        # A comma comes between two values, and may come behind the last one.
        if not empty:
            yield from source.expect(",")
            yield from source.space()
            if (yield from source.peek()) == end:
                continue
            write(", ")
        if json_end == OBJECT:
            assign = layout.assign if len(closing) == 1 else ":"
            yield from _key(source, tables, assign, write)
        # A value is another bracket, a string or a word.
        bracket = BRACKETS.get((yield from source.peek()))
        empty = bracket is not None
        if bracket:
            source.take(source.pos + 1)
            write("{" if bracket[1] == OBJECT else "[")
            closing.append(bracket)
        else:
            yield from _literal(source, tables, write)


def _key(source: TextSource, tables: Tables, assign: str, write: Write) -> Flow[None]:
    """Read a key and what comes between the key and its value."""
    quote = yield from source.match(tables.quotes)
    if quote:
        yield from _string(source, quote, write)
    else:
        word = yield from _word(source)
        write(f'"{quoted(word)}"')
    yield from source.space()
    yield from source.expect(assign)
    write(": ")
    yield from source.space()


def _literal(source: TextSource, tables: Tables, write: Write) -> Flow[None]:
    """Read a string, which is passed on as it comes, or a word."""
    quote = yield from source.match(tables.quotes)
    if quote:
        yield from _string(source, quote, write)
    else:
        word = yield from _word(source)
        write(value_of(word, frozenset()))


def _word(source: TextSource) -> Flow[str]:
    """A word that has no quotes. Broken: there is none."""
    texts: list[str] = []
    yield from source.run(WORD, texts.append)
    if not texts:
        raise Broken
    return "".join(texts)


def _string(source: TextSource, quote: str, write: Write) -> Flow[None]:
    """Read a string from after the *quote* at its beginning to that at its end."""
    ends = _ends(quote)
    write('"')
    while True:
        end = yield from source.until(ends, lambda text: write(quoted(text)))
        if end == quote:
            break
        if not end:
            raise Broken
        yield from _escape(source, write)
    write('"')


@lru_cache(maxsize=64)
def _ends(quote: str) -> Delimiters:
    return Delimiters([quote, "\\"] if quote[0] in "\"'" else [quote])


def _escape(source: TextSource, write: Write) -> Flow[None]:
    """Read an escape of Python from after its backslash."""
    char = yield from source.peek()
    n_digits = CODES.get(char, 0)
    digits = (yield from source.ahead(1 + n_digits))[1:]
    if len(digits) == n_digits > 0 and re.fullmatch("[0-9a-fA-F]+", digits):
        code = int(digits, 16)
        write(json.dumps(chr(code))[1:-1] if code <= 0x10FFFF else "\ufffd")
    elif n_digits or char not in {*ESCAPES, *'"\\/bfnrt'}:
        write("\\\\")  # no escape: the backslash stands for itself
        return
    else:
        write(ESCAPES.get(char, "\\" + char))
    source.take(source.pos + 1 + len(digits))
