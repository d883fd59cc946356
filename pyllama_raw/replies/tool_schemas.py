"""Tools as a constraint reads them: names, and schemas of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pyllama_raw.errors import BadSchema
from pyllama_raw.replies.relaxed_schemas import MAX_COSTLY, ToJson, relaxed
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

T = TypeVar("T")


class Tool(NamedTuple):
    """
    A tool that may be called.

    The schema of one that is strict is kept, or the request is refused. Of another one as much is
    kept as a grammar in the syntax of the model can.
    """

    name: str
    schema: Mapping[str, Any]  # of its arguments, which are an object
    to_json: ToJson
    is_strict: bool
    dropped: list[str]  # places in the schema that are not kept

    def json(self, schema: Mapping[str, Any]) -> str:
        """A rule for a value by *schema*, which may refer to the whole."""
        if schema is not self.schema and (place := _outward_reference(schema)):
            raise self.bad(
                f"$ref: {place!r} is about the whole; give it a name in $defs"
            )
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

    def kept(self, key: str, schema: Any, make: Callable[[Any], T]) -> T | None:
        """
        The rule that *make* makes of the *schema* of the parameter *key*, or of any value.

        Returns:
            None: the syntax of the model has no place for the parameter.

        Raises:
            BadSchema: the tool is strict.
        """
        try:
            return make(schema)
        except BadSchema:
            if self.is_strict:
                raise
        self.dropped.append(f"properties.{key}")
        try:
            return make({})
        except BadSchema:
            return None

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
        if self.is_strict:
            self.check(schema, ENTRIES)
        else:
            self.dropped.extend(sorted(set(schema) - ENTRIES - NOTES))
        properties = dict(schema.get("properties") or {})
        required = schema.get("required") or []
        for key in required:
            properties.setdefault(key, {})
        return [(key, value, key in required) for key, value in properties.items()]


def _outward_reference(schema: object) -> str:
    """A reference in *schema* to the whole that it is a part of; empty if there is none."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            place = value.get("$ref")
            text = place if isinstance(place, str) else ""
            inside = ("#/$defs/", "#/definitions/")
            if text.startswith("#") and not text.startswith(inside):
                return text
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return ""


def tools_of(
    tools: Sequence[Mapping[str, Any]], to_json: ToJson, *, is_loose: bool = False
) -> list[Tool]:
    """
    The last tool of each name holds, as where calls are read.

    Args:
        is_loose: of tools that are not strict any arguments are allowed.

    Raises:
        BadSchema: the schema of a strict tool cannot be kept.
    """
    found: dict[str, Tool] = {}
    n_costly = 0
    for given in tools:
        name, schema = parameters_of(given)
        is_strict, dropped = is_strict_tool(given), list[str]()
        kinds = schema.get("type", "object")
        is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
        # All tools of a request together have the time that one may take.
        is_free = is_loose or not is_object or n_costly >= MAX_COSTLY
        if not is_strict and is_free:
            schema, dropped = {}, ["all"]
        schema = {**schema, "type": "object"}
        if not is_strict:
            schema, more, n_more = relaxed(schema, to_json)
            dropped += more
            n_costly += n_more
        found[name] = tool = Tool(name, schema, to_json, is_strict, dropped)
        if not is_object and is_strict:
            raise tool.bad("the type of parameters is object")
        tool.json(tool.schema)  # all limits of schemas hold in every syntax
    return list(found.values())


def is_strict_tool(tool: Mapping[str, Any]) -> bool:
    """Whether the arguments of a tool have to fit their schema."""
    return tool.get("function", tool).get("strict") is True


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
