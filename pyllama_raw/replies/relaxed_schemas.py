"""
Schemas of tools that only help: what no grammar has is left out of them.

A tool that is not `strict` tells the model what its arguments are like, and promises nothing. So a
keyword that no grammar has must not fail the request. It is left out; where that does not
suffice, the smallest part that cannot be kept becomes any value. The model still reads all of it in
its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from pyllama_raw.errors import BadSchema

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
    found, dropped, n_costly = _relaxed(to_json, text)
    return Relaxed(json.loads(found), dropped, n_costly)


@lru_cache(MAX_KEPT)
def _relaxed(to_json: ToJson, text: str) -> tuple[str, tuple[str, ...], int]:
    relaxing = _Relaxing(to_json, json.loads(text))
    found = json.dumps(relaxing.run())
    return found, tuple(relaxing.dropped[:MAX_NAMED]), relaxing.n_costly


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
            found = self._narrowed(self._root, "", 0)
        except (_TriedEnough, RecursionError):
            found = ANY
        if found != ANY:
            return dict(found)
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
        whole = {**schema, **shared}
        self._n_tried += len(json.dumps(whole))
        is_enough = self._n_failed > MAX_FAILED or self.n_costly >= MAX_COSTLY
        if self._n_tried > MAX_TRIED or is_enough:
            raise _TriedEnough
        try:
            self._to_json(whole)
        except BadSchema as error:
            self._n_failed += 1
            self.n_costly += error.is_costly
            return False
        return True

    def _pruned(self, schema: Any, place: str, depth: int) -> Any:
        """*schema* without the keywords that no grammar has."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return schema
        found = _copied(schema)
        for name in found.keys() & NO_GRAMMAR:
            del found[name]
            self.dropped.append(f"{place}{name}")
        for name, key, child in _children(found):
            inside = _inside(place, name, key)
            _put(found, name, key, self._pruned(child, inside, depth + 1))
        return found

    def _narrowed(self, schema: Any, place: str, depth: int) -> Any:
        """*schema* with parts that cannot be kept as small as possible left out."""
        if self._fits(schema):
            return schema
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            self.dropped.append(place.removesuffix("."))
            return ANY
        found = _copied(schema)
        # First what is inside, because a value of which one property is free says more.
        for name, key, child in _children(found):
            if name not in ("$defs", "definitions"):
                inside = _inside(place, name, key)
                _put(found, name, key, self._narrowed(child, inside, depth + 1))
        if self._fits(found):
            return found
        # Schemas that overlap may be one or the other.
        if "oneOf" in found and "anyOf" not in found:
            either = {
                "anyOf" if name == "oneOf" else name: v for name, v in found.items()
            }
            if self._fits(either):
                self.dropped.append(f"{place}oneOf")
                return either
        # Then one keyword, then all that are not of its structure.
        others = [name for name in found if name not in STRUCTURE]
        for names in (*([name] for name in others), others):
            fewer = {name: found[name] for name in found if name not in names}
            if fewer != found and self._fits(fewer):
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
    found: list[tuple[str, Any, Any]] = []
    for name in BY_NAME:
        if isinstance(schema.get(name), Mapping):
            found += [(name, key, child) for key, child in schema[name].items()]
    for name in ONE:
        if isinstance(schema.get(name), Mapping):
            found.append((name, None, schema[name]))
    for name in LISTS:
        if isinstance(schema.get(name), list):
            found += [(name, at, child) for at, child in enumerate(schema[name])]
    return found


def _inside(place: str, name: str, key: Any) -> str:
    return f"{place}{name}." if key is None else f"{place}{name}.{key}."
