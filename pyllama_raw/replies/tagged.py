"""Arguments that are text between tags become JSON."""

from __future__ import annotations

import re

from pyllama_raw.replies.json_text import quoted
from pyllama_raw.replies.source import (
    MARK,
    Broken,
    Delimiters,
    Flow,
    TextSource,
    Write,
)
from pyllama_raw.replies.spec import TaggedCall
from pyllama_raw.replies.tables import Tables, matched
from pyllama_raw.replies.typed import Schema, items_of, property_of, types_of, value_of

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
            write("}" if tag or not source.cut(tables.parameter) else "")
            return
        try:
            text = yield from source.find(tables.middle_of_parameter)
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
        value = _value(source, tables, layout, fields, schema, write=write)
        if not (yield from value):
            return


def _value(
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
        write('"')
        end = yield from source.until(inner, lambda text: write(quoted(text)))
        write('"' if end else "")
    else:
        found: list[str] = []
        end = yield from source.until(inner, found.append)
        text = "".join(found).replace(MARK, "")
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
    found: list[str] = []
    for key, value in entries:
        of_key = items if is_array else property_of(schema, key, root)
        given = "" if is_array else f'"{quoted(key)}": '
        found.append(given + _nested(value, layout, of_key, root, depth + 1))
    inside = ", ".join(found)
    return f"[{inside}]" if is_array else f"{{{inside}}}"


def _entries(text: str, layout: TaggedCall) -> list[tuple[str, str]]:
    """The keys and values of *text*; none if it is anything else."""
    begin, middle = layout.start[0], layout.middle[0]
    entries: list[tuple[str, str]] = []
    while text:
        key, _, rest = text.removeprefix(begin).partition(middle)
        opening, closing = begin + key + middle, layout.end[0].replace("{key}", key)
        if not text.startswith(opening):
            return []
        depth = 1
        for tag in re.finditer(f"({re.escape(opening)})|{re.escape(closing)}", rest):
            depth += 1 if tag[1] else -1
            if not depth:
                break
        else:
            return []
        entries.append((key, rest[: tag.start()]))
        text = rest[tag.end() :].lstrip()
    return entries
