"""Refusals of llguidance in words for whoever wrote the constraint."""

import pytest

from pyllama_raw.options.constraints import MAX_REFUSAL, N_AROUND, refusal, refused

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
