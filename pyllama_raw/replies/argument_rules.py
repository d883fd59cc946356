"""Rules for arguments that are no JSON: between tags, and as literals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pyllama_raw.replies.lark import Lark, Parts, Rule, Spelled
from pyllama_raw.replies.literals import WORD
from pyllama_raw.replies.source import LIMIT
from pyllama_raw.replies.spec import LiteralCall, TaggedCall
from pyllama_raw.replies.tables import matched, tables_of
from pyllama_raw.replies.tagged import STRING
from pyllama_raw.replies.tool_schemas import NOTES, TEXTS, Tool, text_pattern
from pyllama_raw.replies.typed import NAMES, types_of, values_of, variants

MAX_DEPTH = 16
NUMBERS = frozenset(
    ["type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
OPTIONAL_STRING = frozenset({"string", "null"})
LINE = Spelled("\n")


def tagged(lark: Lark, layout: TaggedCall, tool: Tool, end: Parts) -> Rule:
    """The parameters of a call and what ends it, each perhaps on a line of its own."""
    row: list[str] = []
    for key, schema, is_needed in tool.entries(tool.schema):
        make = partial(_parameter, lark, layout, tool, key)
        if (parameter := tool.kept(key, schema, make)) is not None:
            row.append(parameter + "?" * (not is_needed))
    return lark.rule(" ".join([*row, _on_a_line(lark, end)]))


def _on_a_line(lark: Lark, parts: Parts) -> Rule:
    if not parts or parts[0][:1].isspace():
        return lark.one_of([parts])
    return lark.one_of([parts, [LINE, *parts]])


def _parameter(
    lark: Lark, layout: TaggedCall, tool: Tool, key: str, given: object
) -> Rule:
    schema = tool.resolved(given)
    types = types_of(schema, tool.schema)
    is_text = types == STRING or (types == OPTIONAL_STRING and _is_free(schema, tool))
    form = layout.key[0]
    kind = next(iter(types)) if len(types) == 1 else "object"
    if 'string="{type}' in form:
        kind = "true" if types == STRING else "false"
    if "{type}" in form:
        is_text = types == STRING
    fields = matched(tables_of(lark.spec).keys, form.format(key=key, type=kind))
    if not fields or fields["key"] != key or len(key) > LIMIT:
        raise tool.bad(f"the format of the model has no place for the key {key!r}")
    begin = [
        *lark.first_of(layout.start),
        *lark.form(form, {"key": Spelled(key), "type": Spelled(kind)}),
        *lark.first_of(layout.middle),
    ]
    ends = [end.replace("{key}", key) for end in layout.end]
    if is_text and values_of(schema):
        value = lark.one_of(
            [Spelled(text), *lark.delimiter(ends[0])]
            for text in _texts(lark, tool, schema, ends)
        )
    elif is_text:
        is_plain = types != STRING
        pattern = "(?s:.*)" if is_plain else text_pattern(tool, schema)
        value = lark.until(ends, pattern)
    else:
        value = lark.one_of(
            [lark.rule(tool.json(schema)), *lark.delimiter(end)] for end in ends
        )
    return lark.rule(f"{_on_a_line(lark, begin)} {value}")


def _is_free(schema: Mapping[str, Any], tool: Tool) -> bool:
    """Whether any text is a value."""
    limits = set().union(*variants(schema, tool.schema)) - NOTES
    return limits <= {"type", "anyOf", "oneOf", "$ref"}


def _texts(
    lark: Lark, tool: Tool, schema: Mapping[str, Any], ends: Sequence[str]
) -> list[str]:
    """The texts that *schema* names."""
    tool.check(schema, TEXTS)
    texts = values_of(schema)
    plain = lark.plain(ends)
    for text in texts:
        if not isinstance(text, str) or any(end in text for end in plain):
            raise tool.bad(f"{text!r} cannot stand between the tags of the model")
    return list(texts)


class Literals:
    """Rules for literals with keys."""

    def __init__(self, lark: Lark, layout: LiteralCall, tool: Tool) -> None:
        self._lark, self._tool = lark, tool
        self._quote = layout.quotes[0]
        self._comma = Spelled(", " if layout.assign == "=" else ",")
        # What reads quotes of JSON reads JSON.
        self._value = self._json if '"' in layout.quotes else self._own

    def _json(self, given: Any, _: int) -> Rule:
        schema = self._tool.resolved(given)
        if schema.keys() - NOTES == {"type"} and schema["type"] == "boolean":
            words = ("true", "false", "True", "False")
            return self._lark.one_of([Spelled(word)] for word in words)
        return self._lark.rule(self._tool.json(schema))

    def entries(
        self, schema: Mapping[str, Any], assign: str, close: str, depth: int = 0
    ) -> Rule:
        """Keys and values in their order, with commas between them, and the bracket."""
        lark = self._lark
        first = more = lark.one_of([[Spelled(close)]])
        for key, of_key, is_needed in reversed(self._tool.entries(schema)):
            make = partial(self._pair, key, assign, depth + 1)
            if (entry := self._tool.kept(key, of_key, make)) is None:
                continue
            pair = [*entry, more]
            next_pair = [self._comma, *pair]
            first = lark.one_of([pair] if is_needed else [pair, [first]])
            more = lark.one_of([next_pair] if is_needed else [next_pair, [more]])
        return first

    def _pair(self, key: str, assign: str, depth: int, schema: Any) -> Parts:
        return [*self._key(key), Spelled(assign), self._value(schema, depth)]

    def _own(self, given: Any, depth: int) -> Rule:
        """A value whose strings stand between quotes of the model. Raises BadSchema."""
        tool, lark = self._tool, self._lark
        if depth > MAX_DEPTH:
            raise tool.bad(
                f"values are nested in each other more than {MAX_DEPTH} times"
            )
        schema = tool.resolved(given)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                tool.check(schema, frozenset({word}))
                return lark.one_of([[self._own(s, depth + 1)] for s in schema[word]])
        if values := values_of(schema):
            tool.check(schema, frozenset({"type", "enum", "const"}))
            return lark.one_of(map(self._constant, values))
        kinds = schema.get("type", ["string", "number", "boolean", "null"])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return lark.one_of([self._of(kind, schema, depth)] for kind in kinds)

    def _of(self, kind: object, schema: Mapping[str, Any], depth: int) -> Rule:
        tool, lark = self._tool, self._lark
        if kind == "string":
            text = lark.until([self._quote], text_pattern(tool, schema))
            return lark.one_of([[*lark.delimiter(self._quote), text]])
        if kind == "object":
            rest = self.entries(schema, ":", "}", depth)
            return lark.one_of([[Spelled("{"), rest]])
        if kind == "array":
            return self._array(schema, depth)
        tool.check(schema, NUMBERS)
        return lark.rule(tool.json({**schema, "type": kind}))

    def _array(self, schema: Mapping[str, Any], depth: int) -> Rule:
        lark = self._lark
        self._tool.check(schema, frozenset({"type", "items", "minItems", "maxItems"}))
        item = self._own(schema.get("items", {}), depth + 1)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        more = lark.one_of([[self._comma, item]])
        limit = "" if most is None else max(int(most) - 1, 0)
        others = f"{more}{{{max(least - 1, 0)},{limit}}}" if limit != 0 else ""
        some = f'"[" {item} {others} "]"'
        choices = [some] if most != 0 else []
        return lark.rule(" | ".join([*choices, *(['"[]"'] if not least else [])]))

    def _constant(self, value: object) -> Parts:
        if isinstance(value, str):
            return self._quoted(value)
        if type(value) not in NAMES:
            raise self._tool.bad(f"{value!r} is no literal of the model")
        return [Spelled(json.dumps(value))]

    def _key(self, key: str) -> Parts:
        fits = WORD.fullmatch(key) and len(key) <= LIMIT
        return [Spelled(key)] if fits else self._quoted(key)

    def _quoted(self, text: str) -> Parts:
        if self._quote in text or "\\" in text:
            raise self._tool.bad(
                f"{text!r} cannot stand between the quotes of the model"
            )
        quote = self._lark.delimiter(self._quote)
        return [*quote, Spelled(text), *quote]
