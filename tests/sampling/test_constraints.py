"""Constraints as llguidance is given them, and its refusals in words for whoever wrote one."""

import re
from itertools import product

import pytest

from pyllama_raw.errors import BadSchema
from pyllama_raw.options.constraints import (
    MAX_REFUSAL,
    N_AROUND,
    REGULAR,
    refusal,
    refused,
    rewritten,
    with_ascii_classes,
)


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


STRINGS = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"propertyNames": STRINGS, "items": {"uniqueItems": False}}, {"items": {}}),
        ({"not": False, "dependentRequired": {}, "unevaluatedItems": True}, {}),
        ({"enum": None, "const": None, "minimum": None}, {"const": None}),
        ({"properties": {"a": {"not": {}}}}, {"properties": {"a": False}}),
        ({"additionalProperties": {"not": True}}, {"additionalProperties": False}),
        ({"unevaluatedProperties": False}, {"additionalProperties": False}),
        (
            {"unevaluatedProperties": False, "additionalProperties": {}, "anyOf": []},
            {"additionalProperties": {}, "anyOf": []},
        ),
        ({"prefixItems": [], "unevaluatedItems": False}, {"prefixItems": [], "items": False}),
        ({"minimum": 0.5, "exclusiveMinimum": True}, {"exclusiveMinimum": 0.5}),
        ({"maximum": 5, "exclusiveMaximum": False}, {"maximum": 5}),
        ({"minLength": 1.0, "maxItems": 2.5}, {"minLength": 1, "maxItems": 2.5}),
        ({"$ref": "#/$defs/Map<a, b[]>"}, {"$ref": "#/$defs/Map%3Ca,%20b%5B%5D%3E"}),
        ({"$ref": "#/$defs/Größe~1a%20b%"}, {"$ref": "#/$defs/Gr%C3%B6%C3%9Fe~1a%20b%25"}),
        ({"uniqueItems": True}, {"uniqueItems": True}),
        ({"not": STRINGS}, {"not": STRINGS}),
        (
            {"unevaluatedProperties": False, "allOf": []},
            {"unevaluatedProperties": False, "allOf": []},
        ),
        ({"propertyNames": {"pattern": "a"}}, {"propertyNames": {"pattern": "a"}}),
    ],
    ids=str,
)  # fmt: skip
def test_what_limits_nothing_is_left_out(schema, expected):
    """
    As is null; and what means the same in words that a grammar has is written so.
    """
    assert rewritten(schema) == expected


def test_a_regular_pattern_is_that_of_the_same_texts():
    """
    As Python searches both, over all short texts of signs that matter, and over some addresses.
    """
    letters = ("a", "'", "-", ".", "@b.co")
    texts = ["".join(t) for n in range(1, 7) for t in product(letters, repeat=n)]
    texts += [
        "a.b@c-d.e.org",
        "a..b@c.org",
        ".a@c.org",
        "a@-c.org",
        "a@c.o",
        "a@c..org",
    ]
    assert REGULAR
    for pattern, regular in REGULAR.items():
        assert rewritten({"pattern": pattern}) == {"pattern": regular}
        fits = [bool(re.search(pattern, text)) for text in texts]

        assert [bool(re.search(regular, text)) for text in texts] == fits
        assert True in fits


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


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d{4}-\d", "[0-9]{4}-[0-9]"),
        (r"a-\d", "a-[0-9]"),
        (r"[\d_]", "[[0-9]_]"),
        (r"[^\d]", "[^[0-9]]"),
        (r"[-\d]", "[-[0-9]]"),
        (r"[]\d]", "[][0-9]]"),
        (r"[^]-\d]", "[^]-[0-9]]"),
        (r"[\d-\w]", "[[0-9]-[0-9A-Za-z_]]"),
        (r"[\w--\d]", "[[0-9A-Za-z_]--[0-9]]"),
        (r"[a-]\d", "[a-][0-9]"),
        (r"\\d", r"\\d"),
        (r"\\\d", r"\\[0-9]"),
        (r"\[\d-\d\]", r"\[[0-9]-[0-9]\]"),
        (r"\D\W\S", r"[^0-9][^0-9A-Za-z_][^\t\n\x0b\f\r ]"),
        (r"\p{Nd}\pL\x{64}", r"\p{Nd}\pL\x{64}"),
        (r"[a-\d]", r"[a-\d]"),
        ("\\", "\\"),
        ("[", "["),
        ("a\n.", "a\n."),
    ],
)
def test_classes_become_sets(pattern, expected):
    """
    Escapes of escapes and classes of Unicode stay; so does the mistake of a range to a class.
    """
    assert with_ascii_classes(pattern) == expected


STATE = """
<state>
Tokens: ⟦⟧
0 tokens, 0 bytes; grm_prefix: ""
Parser: {
  "compute_time_us": 5,
}
Stop: NoExtensionBias
</state><grammar>
start: "secret"
</grammar>"""
UNCLOSED = """regex parse error:
    ab[
      ^
error: unclosed character class"""
SMALLER = "shorten it, or lower its numbers and repetitions"
CASES = {
    "states": (
        "regex",
        f"NoExtensionBias{STATE}",
        "it excludes every output: loosen it",
        "",
    ),
    "a short state": (
        "lark",
        "NoExtensionBias\n<non-verbose/>",
        "it excludes every output: loosen it",
        "",
    ),
    "a panic": (
        "lark",
        "panic: index out of bounds\n<backtrace>\n 0: rust_begin_unwind\n</backtrace>",
        "it cannot be read (llguidance failed for it): simplify it",
        "",
    ),
    "a place in a grammar": (
        "lark",
        'at 2(8): unknown name: "b"\n   1 | x: "a"\n   2 | start: b\n              ^\n',
        'unknown name: "b"',
        "line 2, column 8, in `start: b`",
    ),
    "a place in a long line": (
        "lark",
        f"1(801): lexer error\n   1 | {'a' * 800}!{'b' * 800}\n     ^\n",
        "no word of a grammar begins, or ends, in this way",
        f"line 1, column 801, in `...{'a' * N_AROUND}!{'b' * (N_AROUND - 1)}...`",
    ),
    "a pattern, which is a rule of a grammar here": (
        "regex",
        f'at 1(8): invalid regex "ab[" (in regex): {UNCLOSED}\n   1 | start: /ab[/\n           ^\n',
        "unclosed character class, at character 3 of the pattern, in `ab[`",
        "",
    ),
    "a pattern of a schema": (
        "json_schema",
        UNCLOSED,
        "unclosed character class, at character 3 of the pattern, in `ab[`",
        "",
    ),
    "a pattern of several lines": (
        "json_schema",
        "regex parse error:\n~~~~~\n1: a\n2: (\n   ^\n~~~~~\nerror: unclosed group",
        "unclosed group",
        "",
    ),
    "a schema in a grammar": (
        "lark",
        "at 1(8): failed to compile JSON schema: Invalid type: foo\n   1 | start: %json {}\n    ^\n",
        "type: there is none named 'foo'",
        "line 1, column 8, in `start: %json {}`",
    ),
    "keywords": (
        "json_schema",
        'Unimplemented keys: ["if", "then"]',
        "'if', 'then' cannot be held; docs/constraints.md says what to write instead",
        "",
    ),
    "a oneOf": (
        "json_schema",
        "oneOf constraints are not supported. Enable 'coerce_one_of' option",
        "the schemas of a oneOf may overlap: write anyOf, or make them disjoint",
        "",
    ),
    "a limit of a mask": (
        "lark",
        "Parser Error: too many states: 50001 >= 50000\n<non-verbose/>",
        f"it cannot be followed within the limits of one token: {SMALLER}",
        "",
    ),
    "ways to read an output": (
        "lark",
        "parser error: Too many items (limit 10000; mask); try avoiding single-byte/short lexemes",
        "more than 10000 ways to read an output are open for one token: write whole words in place "
        "of single characters, and fewer rules that may be empty",
        "",
    ),
    "a limit of size": (
        "lark",
        "grammar size (number of symbols) too big (limit for this grammar: 200000)",
        f"it has more than 200000 symbols: {SMALLER}",
        "",
    ),
    "what the table does not know": (
        "lark",
        "a newer  version\nsays this",
        "a newer version says this",
        "",
    ),
    "nothing": ("lark", "", "it excludes every output: loosen it", ""),
}


@pytest.mark.parametrize(("kind", "text", "reason", "place"), CASES.values(), ids=CASES)
def test_a_refusal_says_what_is_wrong_and_where(kind, text, reason, place):
    """
    In one line, without anything of the library; the place is apart.
    """
    assert refusal(kind, text) == (reason, place)


def test_the_error_has_the_place_behind_the_reason():
    """
    And as an attribute.
    """
    error = refused("lark", "at 1(8): duplicate rule\n   1 | start: a\n   ^\n")

    assert str(error) == "lark: duplicate rule, at line 1, column 8, in `start: a`"
    assert (error.reason, error.place) == (
        "duplicate rule",
        "line 1, column 8, in `start: a`",
    )


def test_a_refusal_is_short_whatever_a_constraint_has_in_it():
    """
    The text of a constraint may be as long as a message.
    """
    reason, place = refusal(
        "lark", f"at 1(1): unknown name: {'x' * 9999}\n   1 | {'x' * 9999}\n"
    )

    value = " for 'x', got" * 20_000
    quoted = refusal("json_schema", f"Expected f64 for 'minimum', got {value}").reason

    assert len(reason) == len(quoted) == MAX_REFUSAL
    assert len(place) < 100
