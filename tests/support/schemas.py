"""Small JSON schemas of many shapes, made for these tests: (what it describes, schema)."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 12}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{2,8}$"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 99}


def record(*required: str, **properties: Schema) -> Schema:
    """An object with nothing else in it; all properties are required unless some are."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
    }


def items(schema: Schema, least: int, max_items: int) -> Schema:
    return {"type": "array", "items": schema, "minItems": least, "maxItems": max_items}


BY_HAND: list[tuple[str, Schema]] = [
    ("a colour", record(name={"enum": ["red", "green", "blue"]}, level=COUNT)),
    ("a person", record("name", name=WORD, age=COUNT, nick=TEXT)),
    (
        "a list of numbers",
        items({"type": "integer", "minimum": 1, "maximum": 50}, 2, 4),
    ),
    (
        "a range",
        record(low={"type": "number", "minimum": -5, "maximum": 5}, high=COUNT),
    ),
    ("a date", record(day={"type": "string", "format": "date"})),
    ("a choice", {"anyOf": [COUNT, {"enum": ["none", "all"]}, {"type": "null"}]}),
    (
        "a tree",
        {
            "$defs": {
                "leaf": record(value=COUNT),
                "node": record(left={"$ref": "#/$defs/leaf"}, right=COUNT),
            },
            "$ref": "#/$defs/node",
        },
    ),
    ("a constant", record(kind={"const": "point"}, x=COUNT, y=COUNT)),
    ("a flag", record(on={"type": "boolean"}, since={"type": ["integer", "null"]})),
    ("a nested list", items(items(COUNT, 1, 2), 1, 2)),
    ("an id", record(id={"type": "string", "format": "uuid"})),
    (
        "a pair",
        {"type": "array", "prefixItems": [WORD, COUNT], "items": False, "minItems": 2},
    ),
    (
        "an open map",
        {"type": "object", "additionalProperties": COUNT, "maxProperties": 2},
    ),
    ("an address", record(mail={"type": "string", "format": "email"})),
    ("a time", record(at={"type": "string", "format": "time"})),
    ("steps", record(step={"type": "integer", "multipleOf": 5, "maximum": 50})),
]

SIMPLE: list[tuple[str, Schema]] = [
    ("count", COUNT),
    ("word", WORD),
    ("text", TEXT),
    ("truth", {"type": "boolean"}),
    ("nothing", {"type": "null"}),
    ("level", {"enum": ["low", "high", 3, None]}),
    ("share", {"type": "number", "minimum": 0, "maximum": 1}),
    ("day", {"type": "string", "format": "date"}),
]


def _combined() -> list[tuple[str, Schema]]:
    """Pairs of simple ones in every kind of container."""
    schemas = []
    for first, a in SIMPLE:
        schemas.append((f"some {first}", items(a, 1, 3)))
        for second, b in SIMPLE:
            if first < second:
                schemas.append((f"{first} and {second}", record(first=a, second=b)))
                either = {"anyOf": [a, b]}
                schemas.append((f"{first} or {second}", record(value=either)))
                inner = record("a", a=a, b=b)
                schemas.append((f"{first} beside {second}", items(inner, 1, 2)))
    return schemas


SCHEMAS: list[tuple[str, Schema]] = [*BY_HAND, *SIMPLE, *_combined()]
