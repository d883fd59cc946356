"""Specifications are data, and know the special tokens among their delimiters."""

import json

import pytest

from pyllama_raw.replies.schemas import types_of, value_of
from pyllama_raw.replies.spec import CallsSpec, JsonCall, ReplySpec, bundled


def test_bundled_specifications_are_json_both_ways():
    """
    What is dumped as JSON is read as the same specification.
    """
    specs = bundled()

    again = {
        name: ReplySpec.model_validate_json(spec.model_dump_json())
        for name, spec in specs.items()
    }

    assert again == specs


def test_special_tokens_are_found_alone_and_between_text():
    """
    A bound specification has those tokens of a vocabulary that its delimiters are made of.
    """
    spec = ReplySpec(
        calls=CallsSpec(
            layout=JsonCall(header=("{name}[ID]{id}",), header_end=("[ARGS]",))
        ),
        ignored=("<a>text<b>", "<c>"),
    )

    bound = spec.bound({"<a>", "<b>", "[ID]", "[ARGS]", "a", "<d>"}.__contains__)

    assert bound.special >= {"<a>", "<b>", "[ID]", "[ARGS]"}
    assert not bound.special & {"<c>", "<d>"}
    assert bound.pieces("<a>text<b>") == [("<a>", True), ("text", False), ("<b>", True)]


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("1", ["integer"], 1),
        ("1", ["number"], 1),
        ("1", [], 1),
        ("1", ["string", "null"], "1"),
        ("null", ["string", "null"], None),
        ("None", ["null", "integer"], None),
        ("True", ["boolean"], True),
        ("[1", ["array"], "[1"),
        ("NaN", ["number"], "NaN"),
        ('{"a": 1}', ["object", "string"], {"a": 1}),
        ("{no}", ["object", "string"], "{no}"),
        ("2 dollars", ["integer"], "2 dollars"),
        (" spaced ", [], " spaced "),
    ],
)
def test_text_becomes_a_value_of_the_types_that_are_allowed(
    text: str, types: list[str], expected: object
):
    """
    Bare text is a value of an allowed type if it is JSON of one, and a string otherwise.
    """
    assert json.loads(value_of(text, frozenset(types))) == expected


def test_types_are_found_through_references_and_unions():
    """
    The types of a property are those of all that its schema refers to.
    """
    root = {"$defs": {"a": {"enum": ["x", 1]}, "b": {"$ref": "#/$defs/b"}}}
    schema = {
        "anyOf": [
            {"$ref": "#/$defs/a"},
            {"type": ["null", "array"]},
            {"$ref": "#/$defs/b"},
        ]
    }

    assert types_of(schema, root) == {"string", "integer", "null", "array"}
    assert types_of({}, root) == frozenset()
    assert types_of({"$ref": "#/nowhere", "anyOf": 3}, root) == frozenset()
