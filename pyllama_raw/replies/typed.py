"""Values that a model wrote as bare text become JSON, by the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

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
    found = (part.get("properties") for part in variants(schema, root))
    return _first(each.get(key) for each in found if isinstance(each, Mapping))


def items_of(schema: Schema, root: Schema) -> Schema:
    """The schema of the items of an array; empty if it does not say."""
    return _first(part.get("items") for part in variants(schema, root))


def _first(found: Iterable[Any]) -> Schema:
    return next((each for each in found if isinstance(each, Mapping)), {})


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """The types that *schema* allows; none if it does not say."""
    found: set[str] = set()
    for part in variants(schema, root):
        given = part.get("type", ())
        found.update([given] if isinstance(given, str) else map(str, given))
        if "type" not in part:
            found.update(map(name_of, values_of(part)))
            found.update({"object"} if "properties" in part else set())
            found.update({"array"} if "items" in part else set())
    return frozenset(found)


def values_of(schema: Schema) -> Sequence[Any]:
    """The values that *schema* names one by one; none if it names none."""
    return schema.get("enum") or ([schema["const"]] if "const" in schema else [])


def variants(schema: Any, root: Schema, depth: int = 8) -> list[Schema]:
    """*schema* and all that it refers to or is composed of."""
    if not isinstance(schema, Mapping) or not depth:
        return []
    parts = [schema.get("$ref") and referred(str(schema["$ref"]), root)]
    for key in ("anyOf", "oneOf", "allOf"):
        parts += schema[key] if isinstance(schema.get(key), list) else []
    return [
        schema,
        *(found for part in parts for found in variants(part, root, depth - 1)),
    ]


def referred(reference: str, root: Schema) -> Any:
    """The target of a reference within *root*; None if there is none."""
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


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
            found = name_of(json.loads(candidate, parse_constant=refused))
        except (ValueError, RecursionError):
            continue
        if not types or found in types or (found == "integer" and "number" in types):
            return candidate
        if found == "number" and "integer" in types and "string" not in types:
            return candidate
    return json.dumps(text, ensure_ascii=False)
