"""Values whose own entries are between tags become JSON."""

from __future__ import annotations

import json

from pyllama_raw.replies.spec import TaggedCall
from pyllama_raw.replies.typed import Schema, items_of, property_of, types_of, value_of

MAX_DEPTH = 32


def nested_value(
    text: str, layout: TaggedCall, schema: Schema, root: Schema, depth: int = 0
) -> str:
    """*text* as JSON. What is allowed to be a string has no entries of its own."""
    types = types_of(schema, root)
    entries = (
        entries_of(text.strip(), layout)
        if layout.nested and depth < MAX_DEPTH
        else None
    )
    if not entries or "string" in types:
        return value_of(text, types)
    if "array" in types or (
        "object" not in types and {key for key, _ in entries} == {"item"}
    ):
        items = items_of(schema, root)
        found = [
            nested_value(value, layout, items, root, depth + 1) for _, value in entries
        ]
        return f"[{', '.join(found)}]"
    pairs = [
        f"{json.dumps(key, ensure_ascii=False)}: "
        + nested_value(value, layout, property_of(schema, key, root), root, depth + 1)
        for key, value in entries
    ]
    return f"{{{', '.join(pairs)}}}"


def entries_of(text: str, layout: TaggedCall) -> list[tuple[str, str]] | None:
    """The keys and values of *text*, or None if it is anything else."""
    begin, middle = layout.start[0], layout.middle[0]
    entries: list[tuple[str, str]] = []
    while text:
        key, found, rest = text.removeprefix(begin).partition(middle)
        if not text.startswith(begin) or not found:
            return None
        opening, closing = begin + key + middle, layout.end[0].replace("{key}", key)
        end = end_of(rest, opening, closing)
        if end is None:
            return None
        entries.append((key, rest[:end]))
        text = rest[end + len(closing) :].lstrip()
    return entries


def end_of(text: str, opening: str, closing: str) -> int | None:
    """The index of the *closing* that belongs to an opening before *text*."""
    depth, at = 1, 0
    while True:
        end = text.find(closing, at)
        if end < 0:
            return None
        depth += text.count(opening, at, end) - 1
        if not depth:
            return end
        at = end + len(closing)
