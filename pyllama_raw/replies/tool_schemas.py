"""Tools as a constraint reads them: names, and schemas of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pyllama_raw.errors import BadSchema
from pyllama_raw.replies.typed import parameters_of, referred

# What says nothing about values.
NOTES = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
    ]
)
ENTRIES = frozenset({"type", "properties", "required", "additionalProperties"})
TEXTS = frozenset(
    ["type", "enum", "const", "minLength", "maxLength", "pattern", "format"]
)
MAX_REFERENCES = 8  # that follow each other
ANCHORS = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|([|^$]|\(\?)")

_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_HOST = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTS = rf"{_HOST}(\.{_HOST}){{0,8}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_WORD = "[a-zA-Z0-9_+-]+"
_PATH = "[a-zA-Z0-9._~!$&'()*+,;=:@-]*"
FORMATS = {  # the standard says to ignore all others
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "-".join(f"{_HEX}{{{n}}}" for n in (8, 4, 4, 4, 12)),
    "hostname": _HOSTS,
    "email": rf"{_WORD}(\.{_WORD})*@{_HOSTS}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": rf"https?://{_HOSTS}(:[0-9]{{1,4}})?(/{_PATH})*(\?{_PATH})?",
}
UNKNOWN_HERE = frozenset({"duration", "ipv6"})

ToJson = Callable[[Any], str]  # raises BadSchema


class Tool(NamedTuple):
    """A tool that may be called."""

    name: str
    schema: Mapping[str, Any]  # of its arguments, which are an object
    to_json: ToJson

    def json(self, schema: Mapping[str, Any]) -> str:
        """A rule for a value by *schema*, which may refer to the whole."""
        shared = {
            key: self.schema[key]
            for key in ("$defs", "definitions")
            if key in self.schema
        }
        try:
            return f"%json {self.to_json({**schema, **shared})}"
        except BadSchema as error:
            raise self.bad(error.reason) from None

    def check(self, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        """Raise BadSchema if *schema* says what this syntax cannot promise."""
        unknown = sorted(set(schema) - known - NOTES)
        if unknown:
            reason = f"{', '.join(unknown)}: what this model writes is no JSON here"
            raise self.bad(f"{reason}; allowed are {', '.join(sorted(known))}")

    def bad(self, reason: str) -> BadSchema:
        return BadSchema("tools", f"{self.name!r}: {reason}")

    def resolved(self, schema: object) -> Mapping[str, Any]:
        """*schema*, or what it refers to."""
        for _ in range(MAX_REFERENCES):
            if schema is True:
                return {}
            if not isinstance(schema, Mapping):
                raise self.bad("a schema is an object")
            if not isinstance(schema.get("$ref"), str):
                return schema
            rest = {k: v for k, v in schema.items() if k != "$ref" and k not in NOTES}
            found = referred(schema["$ref"], self.schema)
            schema = {**found, **rest} if isinstance(found, Mapping) else found
        raise self.bad("too many references follow each other")

    def entries(self, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """The keys of an object, their schemas, and whether it has to have them."""
        self.check(schema, ENTRIES)
        properties = dict(schema.get("properties") or {})
        required = schema.get("required") or []
        for key in required:
            properties.setdefault(key, {})
        return [(key, value, key in required) for key, value in properties.items()]


def tools_of(tools: Sequence[Mapping[str, Any]], to_json: ToJson) -> list[Tool]:
    """The last tool of each name holds, as where calls are read."""
    found: dict[str, Tool] = {}
    for given in tools:
        name, schema = parameters_of(given)
        kinds = schema.get("type", "object")
        found[name] = tool = Tool(name, {**schema, "type": "object"}, to_json)
        if kinds != "object" and (not isinstance(kinds, list) or "object" not in kinds):
            raise tool.bad("the type of parameters is object")
        tool.json(tool.schema)  # all limits of schemas hold in every syntax
    return list(found.values())


def text_pattern(tool: Tool, schema: Mapping[str, Any]) -> str:
    """A regular expression of the text that *schema* allows. Raises BadSchema."""
    tool.check(schema, TEXTS)
    limits = [name for name in ("pattern", "format") if name in schema]
    if "minLength" in schema or "maxLength" in schema:
        limits.append("length")
    if len(limits) > 1:
        raise tool.bad(f"{' and '.join(limits)} of one text: between tags, give one")
    if "pattern" in schema:
        return _searched(tool, str(schema["pattern"]))
    if schema.get("format") in UNKNOWN_HERE:
        raise tool.bad(f"the format {schema['format']} cannot stand between tags")
    if schema.get("format") in FORMATS:
        return FORMATS[schema["format"]]
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    return f"(?s:.{{{least},{'' if most is None else int(most)}}})"


def _searched(tool: Tool, pattern: str) -> str:
    """A pattern of JSON Schema, which is searched for, as one of the whole text."""
    inner = pattern.removeprefix("^").removesuffix("$")
    if any(found[1] for found in ANCHORS.finditer(inner)) or inner.endswith("\\"):
        raise tool.bad(f"pattern {pattern!r}: between tags it has none of | ^ $ (?")
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    return begin + inner + ("" if pattern.endswith("$") else "(?s:.*)")
