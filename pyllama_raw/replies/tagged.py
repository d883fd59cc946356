"""Arguments that are text between tags become JSON."""

from __future__ import annotations

from collections.abc import Callable

from pyllama_raw.replies.json_text import quoted
from pyllama_raw.replies.nested import nested_value
from pyllama_raw.replies.source import MARK, Broken, Delimiters, Flow, TextSource
from pyllama_raw.replies.tables import Tables, matched
from pyllama_raw.replies.typed import Schema, property_of, types_of

Write = Callable[[str], None]

KEY_LIMIT = 256  # characters; what goes on for longer is no key
TYPES_OF_STRING = ("string", "true")
STRING = frozenset({"string"})


def read_tagged(
    source: TextSource, tables: Tables, schema: Schema, write: Write
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
            write("}" if tag or not source.cut(tables.parameter) else "")
            return
        try:
            text = yield from source.find(tables.middle_of_parameter, KEY_LIMIT)
        except Broken:
            text = ""
        fields = matched(tables.keys, text)
        if not fields:
            write("" if source.ended else "}")
            raise Broken
        source.take(source.pos + len(text))
        yield from source.match(tables.middle_of_parameter)
        source.drop()
        write(f'{comma}"{quoted(fields["key"])}": ')
        comma = ", "
        if not (yield from _value(source, tables, fields, schema, write)):
            return


def _value(
    source: TextSource,
    tables: Tables,
    fields: dict[str, str],
    schema: Schema,
    write: Write,
) -> Flow[bool]:
    """Read the value of one parameter; False where the reply ends within it."""
    layout = tables.tagged
    assert layout
    of_key = property_of(schema, fields["key"], schema)
    types = types_of(of_key, schema)
    if "type" in fields:
        types = STRING if fields["type"] in TYPES_OF_STRING else frozenset()
    ends = tables.value_ends(fields["key"])
    quote = yield from source.match(tables.quotes)
    if quote:
        ends = Delimiters([dict(layout.quotes)[quote]])
    if types == STRING:
        write('"')
        end = yield from source.until(ends, lambda text: write(quoted(text)))
        write('"' if end else "")
    else:
        found: list[str] = []
        end = yield from source.until(ends, found.append)
        text = "".join(found).replace(MARK, "")
        write(nested_value(text, layout, of_key, schema) if end else text)
    if quote:
        yield from source.space()
        yield from source.match(tables.value_ends(fields["key"]))
    return bool(end)
