"""Schemas as they are passed to llguidance: what it would read wrongly is written anew."""

import pytest

from pyllama_raw.errors import BadSchema
from pyllama_raw.options.constraints import rewritten


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"exclusiveMinimum": 0}, {"minimum": 1e-14}),
        ({"exclusiveMaximum": -12.0}, {"maximum": -12.0000000000001}),
        ({"exclusiveMinimum": 1, "minimum": 3}, {"minimum": 3}),
        ({"exclusiveMinimum": 3, "minimum": 1}, {"minimum": 3.00000000000001}),
        ({"exclusiveMinimum": 0.5}, {"exclusiveMinimum": 0.5}),
        ({"exclusiveMaximum": 2**52}, {"maximum": 2**52 - 1}),
        ({"minimum": 0, "maximum": 2**64 - 1}, {"minimum": 0, "maximum": 2**53}),
        ({"minimum": -1e300}, {"minimum": -(2**53)}),
        ({"maximum": 2.1029999999999998}, {"maximum": 2.1029999999999}),
        ({"minimum": 2.1029999999999998}, {"minimum": 2.103}),
        ({"maximum": 1e-300}, {"maximum": 0.0}),
        ({"minimum": "1"}, {"minimum": "1"}),
    ],
)
def test_a_bound_excludes_what_it_says(given, written):
    """
    No number that the given bounds exclude is between the written ones.
    """
    assert rewritten(given) == written


NODE = {"exclusiveMinimum": 0, "format": "none such"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": NODE}},
        {"$defs": {"a": NODE}},
        {"patternProperties": {"a": NODE}},
        {"additionalProperties": NODE},
        {"items": NODE},
        {"items": [NODE]},
        {"prefixItems": (True, NODE)},
        {"anyOf": [{"allOf": [NODE]}]},
        {"oneOf": [NODE]},
    ],
    ids=str,
)
def test_every_schema_in_a_schema_is_written_anew(schema):
    """
    Wherever one may stand.
    """
    written = str(rewritten(schema))

    assert "'minimum': 1e-14" in written
    assert "none such" not in written


def test_what_is_no_schema_is_left_alone():
    """
    Names of properties and values may be those of keywords.
    """
    schema = {
        "properties": {"exclusiveMinimum": {"type": "null"}, "format": True},
        "const": {"exclusiveMinimum": 0, "format": "none such"},
        "default": {"exclusiveMinimum": 0},
    }

    assert rewritten(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": [1, -(2**53) - 1]},
        {"items": {"const": {"a": [0.1 + 0.2]}}},
        {"const": 1e23},
        {"const": 1e-300},
        {"minimum": 2**53 + 1},
        {"exclusiveMaximum": -(2**53)},
        {"multipleOf": 1e30},
    ],
)
def test_a_number_that_would_change_is_refused(schema):
    """
    With its name and what is allowed.
    """
    with pytest.raises(BadSchema, match=r"is not kept exactly; allowed are") as caught:
        rewritten(schema)

    assert any(name in str(caught.value) for name in (*schema, "const"))


def test_an_unknown_format_is_ignored(caplog):
    """
    As the standard says, with a line in the log.
    """
    schema = {"type": "string", "format": "phone"}

    assert rewritten(schema) == {"type": "string"}
    assert "the unknown format 'phone' is ignored" in caplog.text
