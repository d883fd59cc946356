"""
Schemas of tools: what a constraint keeps of them, and the types of values that they name.

Rules:
1. The schema of a tool that is `strict` is kept as it is, or the request is refused.
2. A tool that is not `strict` tells the model what its arguments are like, and promises nothing.
   So a keyword that no grammar has must not fail the request. It is left out; where that does not
   suffice, the smallest part that cannot be kept becomes any value. The model still reads all of
   it in its prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from pyllama_raw.errors import BadSchema

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
MAX_DIGITS = 8  # of a place in a list
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

    def check(self, schema: Mapping[str, Any], keywords: frozenset[str]) -> None:
        """Raise BadSchema if *schema* says what this syntax cannot promise."""
        unknown = sorted(set(schema) - keywords - NOTES)
        if unknown:
            reason = f"{', '.join(unknown)}: what this model writes is no JSON here"
            raise self.bad(f"{reason}; allowed are {', '.join(sorted(keywords))}")

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
            fields = {k: v for k, v in schema.items() if k != "$ref" and k not in NOTES}
            target = referred(schema["$ref"], self.schema)
            schema = {**target, **fields} if isinstance(target, Mapping) else target
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
    by_name: dict[str, Tool] = {}
    n_costly = 0
    for declaration in tools:
        name, schema = parameters_of(declaration)
        is_strict, dropped = is_strict_tool(declaration), list[str]()
        kinds = schema.get("type", "object")
        is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
        # All tools of a request together have the time that one may take.
        is_free = is_loose or not is_object or n_costly >= MAX_COSTLY
        if not is_strict and is_free:
            schema, dropped = {}, ["all"]
        schema = {**schema, "type": "object"}
        if not is_strict:
            schema, places, n_tried = relaxed(schema, to_json)
            dropped += places
            n_costly += n_tried
        by_name[name] = tool = Tool(name, schema, to_json, is_strict, dropped)
        if not is_object and is_strict:
            raise tool.bad("the type of parameters is object")
        tool.json(tool.schema)  # all limits of schemas hold in every syntax
    return list(by_name.values())


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
    lower, upper = int(schema.get("minLength", 0)), schema.get("maxLength")
    return f"(?s:.{{{lower},{'' if upper is None else int(upper)}}})"


def _searched(tool: Tool, pattern: str) -> str:
    """A pattern of JSON Schema, which is searched for, as one of the whole text."""
    inner = pattern.removeprefix("^").removesuffix("$")
    if any(match[1] for match in ANCHORS.finditer(inner)) or inner.endswith("\\"):
        raise tool.bad(f"pattern {pattern!r}: between tags it has none of | ^ $ (?")
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    return begin + inner + ("" if pattern.endswith("$") else "(?s:.*)")


# -- schemas that only help --------------------------------------------------------------

ToJson = Callable[[Any], str]  # raises BadSchema

NO_GRAMMAR = frozenset(
    [
        "not", "if", "then", "else", "contains", "minContains", "maxContains",
        "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "propertyNames",
        "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef",
        "$recursiveRef",
    ]
)  # fmt: skip
BY_NAME = ("$defs", "definitions", "properties", "patternProperties")
ONE = ("items", "additionalProperties", "additionalItems")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
STRUCTURE = frozenset(
    ["type", "properties", "required", "items", "$ref", "$defs", "definitions"]
)
ANY: dict[str, Any] = {}
OBJECT: dict[str, Any] = {"type": "object"}
MAX_DEPTH = 64  # of schemas in each other
MAX_TRIED = 2**20  # characters of schemas that are tried for one tool
MAX_FAILED = 32  # of these that fail
MAX_COSTLY = (
    6  # of these that fail at a limit of time or memory: each may take a second
)
MAX_KEPT = 256  # tools whose schemas are remembered
MAX_NAMED = 16  # places that are named in the log


class Relaxed(NamedTuple):
    """A schema that a grammar keeps."""

    schema: dict[str, Any]
    dropped: tuple[str, ...]  # what is left out of it, as `properties.tags.uniqueItems`
    n_costly: int = 0  # schemas that were tried up to a limit of time or memory


def relaxed(schema: Mapping[str, Any], to_json: ToJson) -> Relaxed:
    """
    *schema*, of an object, or as much of it as *to_json* takes; never raises.

    The latest results are kept, because an agent sends its tools with each request.
    """
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        return Relaxed(OBJECT, ("all",))
    schema_json, dropped, n_costly = _relaxed(to_json, text)
    return Relaxed(json.loads(schema_json), dropped, n_costly)


@lru_cache(MAX_KEPT)
def _relaxed(to_json: ToJson, text: str) -> tuple[str, tuple[str, ...], int]:
    relaxing = _Relaxing(to_json, json.loads(text))
    schema_json = json.dumps(relaxing.run())
    return schema_json, tuple(relaxing.dropped[:MAX_NAMED]), relaxing.n_costly


class _TriedEnough(Exception):
    """Sign that a schema takes too long."""


class _Relaxing:
    def __init__(self, to_json: ToJson, root: dict[str, Any]) -> None:
        self._to_json, self._root = to_json, root
        self._n_tried = self._n_failed = self.n_costly = 0
        self.dropped: list[str] = []

    def run(self) -> dict[str, Any]:
        try:
            if self._fits(self._root):
                return self._root
            self._root = self._pruned(self._root, "", 0)
            # Definitions come first: what refers to one that cannot be kept cannot be either.
            for name in ("$defs", "definitions"):
                definitions = self._root.get(name)
                if not isinstance(definitions, dict):
                    continue
                for key in definitions:
                    place = f"{name}.{key}."
                    definitions[key] = self._narrowed(definitions[key], place, 1)
            schema = self._narrowed(self._root, "", 0)
        except (_TriedEnough, RecursionError):
            schema = ANY
        if schema != ANY:
            return dict(schema)
        self.dropped.append("all")
        return OBJECT

    def _fits(self, schema: Any) -> bool:
        shared = {
            name: self._root[name]
            for name in ("$defs", "definitions")
            if isinstance(self._root.get(name), Mapping)
        }
        if not isinstance(schema, Mapping):
            return isinstance(schema, bool) and schema
        complete = {**schema, **shared}
        self._n_tried += len(json.dumps(complete))
        is_enough = self._n_failed > MAX_FAILED or self.n_costly >= MAX_COSTLY
        if self._n_tried > MAX_TRIED or is_enough:
            raise _TriedEnough
        try:
            self._to_json(complete)
        except BadSchema as error:
            self._n_failed += 1
            self.n_costly += error.is_costly
            return False
        return True

    def _pruned(self, schema: Any, place: str, depth: int) -> Any:
        """*schema* without the keywords that no grammar has."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return schema
        pruned = _copied(schema)
        for name in pruned.keys() & NO_GRAMMAR:
            del pruned[name]
            self.dropped.append(f"{place}{name}")
        for name, key, child in _children(pruned):
            inside = _inside(place, name, key)
            _put(pruned, name, key, self._pruned(child, inside, depth + 1))
        return pruned

    def _narrowed(self, schema: Any, place: str, depth: int) -> Any:
        """*schema* with parts that cannot be kept as small as possible left out."""
        if self._fits(schema):
            return schema
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            self.dropped.append(place.removesuffix("."))
            return ANY
        narrowed = _copied(schema)
        # First what is inside, because a value of which one property is free says more.
        for name, key, child in _children(narrowed):
            if name not in ("$defs", "definitions"):
                inside = _inside(place, name, key)
                _put(narrowed, name, key, self._narrowed(child, inside, depth + 1))
        if self._fits(narrowed):
            return narrowed
        # Schemas that overlap may be one or the other.
        if "oneOf" in narrowed and "anyOf" not in narrowed:
            either = {
                "anyOf" if name == "oneOf" else name: v for name, v in narrowed.items()
            }
            if self._fits(either):
                self.dropped.append(f"{place}oneOf")
                return either
        # Then one keyword, then all that are not of its structure.
        loose = [name for name in narrowed if name not in STRUCTURE]
        for names in (*([name] for name in loose), loose):
            fewer = {name: narrowed[name] for name in narrowed if name not in names}
            if fewer != narrowed and self._fits(fewer):
                self.dropped += [f"{place}{name}" for name in names]
                return fewer
        self.dropped.append(place.removesuffix("."))
        return ANY


def _copied(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose children can be replaced."""
    containers = {*BY_NAME, *LISTS}
    return {
        name: value.copy()
        if name in containers and isinstance(value, dict | list)
        else value
        for name, value in schema.items()
    }


def _put(schema: dict[str, Any], name: str, key: Any, child: Any) -> None:
    """Replace one child of *schema*."""
    if key is None:
        schema[name] = child
    else:
        schema[name][key] = child


def _children(schema: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Schemas in *schema*: the keyword, the key or index there, and the schema."""
    children: list[tuple[str, Any, Any]] = []
    for name in BY_NAME:
        if isinstance(schema.get(name), Mapping):
            children += [(name, key, child) for key, child in schema[name].items()]
    for name in ONE:
        if isinstance(schema.get(name), Mapping):
            children.append((name, None, schema[name]))
    for name in LISTS:
        if isinstance(schema.get(name), list):
            children += [(name, at, child) for at, child in enumerate(schema[name])]
    return children


def _inside(place: str, name: str, key: Any) -> str:
    return f"{place}{name}." if key is None else f"{place}{name}.{key}."


# -- schemas of values -------------------------------------------------------------------

Schema = Mapping[str, Any]

MAX_VARIANTS = 1000  # of one schema; each argument of a call looks at all of them
NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
PLAIN = {"true": "true", "false": "false", "none": "null", "null": "null"}


def parameters_of(tool: Mapping[str, Any]) -> tuple[str, Schema]:
    """The name of a tool and the schema of its arguments."""
    function = tool.get("function", tool)
    schema = function.get("parameters") or function.get("input_schema")
    return str(function.get("name", "")), schema if isinstance(schema, Mapping) else {}


def property_of(schema: Schema, key: str, root: Schema) -> Schema:
    """The schema of the property *key*; empty if there is none."""
    properties = (part.get("properties") for part in variants(schema, root))
    return _first(
        mapping.get(key) for mapping in properties if isinstance(mapping, Mapping)
    )


def items_of(schema: Schema, root: Schema) -> Schema:
    """The schema of the items of an array; empty if it does not say."""
    return _first(part.get("items") for part in variants(schema, root))


def _first(values: Iterable[Any]) -> Schema:
    return next((value for value in values if isinstance(value, Mapping)), {})


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """The types that *schema* allows; none if it does not say."""
    types: set[str] = set()
    for part in variants(schema, root):
        declaration = part.get("type")
        kinds = declaration if isinstance(declaration, list | tuple) else [declaration]
        types.update(kind for kind in kinds if isinstance(kind, str))
        if "type" not in part:
            types.update(map(name_of, values_of(part)))
            types.update({"object"} if "properties" in part else set())
            types.update({"array"} if "items" in part else set())
    return frozenset(types)


def values_of(schema: Schema) -> Sequence[Any]:
    """The values that *schema* names one by one; none if it names none."""
    values = schema.get("enum")
    if values and isinstance(values, list | tuple):  # a tool that is not strict may err
        return values
    return [schema["const"]] if "const" in schema else []


def variants(schema: Any, root: Schema) -> list[Schema]:
    """
    *schema* and all that it refers to or is composed of, each once.

    What refers to itself in several ways has no end otherwise.
    """
    parts: list[Schema] = []
    ids: set[int] = set()  # all live in *schema* or *root*
    waiting = [schema]
    while waiting and len(ids) < MAX_VARIANTS:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in ids:
            continue
        ids.add(id(part))
        parts.append(part)
        inside = [part.get("$ref") and referred(str(part["$ref"]), root)]
        for key in ("anyOf", "oneOf", "allOf"):
            inside += part[key] if isinstance(part.get(key), list) else []
        waiting += reversed(inside)
    return parts


def referred(reference: str, root: Schema) -> Any:
    """The target of a reference within *root*; None if there is none."""
    target: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        # Signs of addresses and of pointers stand in a name by escapes, if its writer knew of them.
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(step, target.get(name))
        elif isinstance(target, list) and name.isdecimal() and len(name) < MAX_DIGITS:
            target = target[int(name)] if int(name) < len(target) else None
        else:
            return None
    return target


def name_of(value: object) -> str:
    return NAMES.get(type(value), "array" if isinstance(value, list) else "object")


def refused(constant: str) -> object:
    raise ValueError(constant)  # NaN and infinity, which JSON has not


def value_of(text: str, types: frozenset[str]) -> str:
    """
    *text* as JSON of one of *types*, or of any type if they are none.

    Text that is of no other type is a string.
    """
    bare = text.strip()
    for candidate in (bare, PLAIN.get(bare.lower(), "")):
        try:
            kind = name_of(json.loads(candidate, parse_constant=refused))
        except (ValueError, RecursionError):
            continue
        if not types or kind in types or (kind == "integer" and "number" in types):
            return candidate
        if kind == "number" and "integer" in types and "string" not in types:
            return candidate
    return json.dumps(text, ensure_ascii=False)
