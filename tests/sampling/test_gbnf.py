"""Grammars are refused with a place and a reason before libllama sees them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyllama_raw.errors import BadGrammar
from pyllama_raw.options.gbnf import MAX_ITEMS, to_lark

GOOD = [
    'root ::= "a"',
    'root ::= "a" | "b" |\n  "c" # a comment\n\nother ::= root*',
    "root ::= [a-z^0-9_\\-\\]]+ [^\\n\\r]? .",
    'root ::= ("x" ("y" | "z"){2,5}\n "w"){3} item{1,}\nitem-2 ::= "\\x41\\u00e9\\U0001F600"\n'
    "item ::= item-2",
    'root ::= <[12]> !<[7]> <think> "é"',
    "root ::=",
    "# only comments\nroot ::= 'a'?".replace("'", '"'),
    'root ::= "a"\r\nb ::= "c"\r\n',
    'root ::= ("a" # inside\n | "b")',
]

BAD = [
    ("", None, "no rule is named 'root'"),
    ('start ::= "a"', None, "no rule is named 'root'"),
    ('root ::= "a', 9, "a string"),
    ('root ::= "\\q"', 9, "known escapes"),
    ("root ::= [a-z", 9, "a set"),
    ("root ::= <12", 9, "a token"),
    ('root = "a"', 5, "expected ::="),
    ("root ::= item", 9, "no rule is named 'item'"),
    ('root ::= ("a" ("b")', 9, "not closed"),
    ('root ::= "a" )', 13, "new line"),
    ("root ::= *", 9, "nothing before"),
    ('root ::= ""+', 11, "nothing before"),
    ('root ::= "a"{', 12, "expected {n}"),
    ('root ::= "a"{3,1}', 12, "less than"),
    ('root ::= "a"{100001}', 12, "repetitions"),
    ('root ::= "a"{1,99999999999}', 12, "repetitions"),
    ("root ::= " + "(" * 101 + '"a"' + ")" * 101, 109, "parentheses"),
    ("root ::= (" + "a*" * 4 + "*" * 99 + ")", 117, "in each other"),
    ("root ::= " + '"a"|' * 40_000, 9 + 10_922 * 4 + 3, f"{MAX_ITEMS} items"),
    ('root ::= "' + "a" * 16_385 + '"', 9, "at most 16384 characters"),
    ("root ::= [" + "a" * 16_385 + "]", 9, "at most 16384 characters"),
    ("root ::= " + f"[{'a' * 16_000}]" * 3, 9 + 16_002 * 3, f"{MAX_ITEMS} items"),
    (r'root ::= "\x00"', 9, "no text has the character 0x0"),
    (r'root ::= "\uD800"', 9, "no text has the character 0xd800"),
    (r'root ::= "\U00110000"', 9, "no text has the character 0x110000"),
    ('root ::= "\ud800"', 10, "surrogates"),
    ('root ::= "a\0"', 11, "NUL"),
    ('root ::= "a" ; b', 13, "new line"),
    ("root ::= [a] <other>", 13, "'other' is no single token"),
    ("root ::= <[100]>", 9, "100 is no single token"),
]


def check(text: str, root: str = "root") -> str:
    """As Lark; <think> is a token, and so are ids below 100."""
    tokens = {"think": 7} | {number: number for number in range(100)}
    return to_lark(text, root, tokens.get, ())


@pytest.mark.parametrize("text", GOOD)
def test_grammars_are_taken(text):
    """
    Everything the format has.
    """
    check(text)


@pytest.mark.parametrize(("text", "position", "words"), BAD)
def test_mistakes_have_a_place(text, position, words):
    """
    The error names the index in the text where it is, if it is at one place.
    """
    with pytest.raises(BadGrammar, match=words) as caught:
        check(text)

    assert caught.value.position == position


def test_another_root_can_be_named():
    """
    It has to have a rule.
    """
    check('start ::= "a"', "start")

    with pytest.raises(BadGrammar, match="'root'"):
        check('start ::= "a"')


def test_tokens_without_text_are_written_once_for_each_that_is_excluded():
    """
    What excludes a token excludes all that have no text: thousands in some vocabularies.
    """
    silent = range(1_000_000, 1_006_400)

    text = to_lark("root ::= " + "!<[5]> " * 10_000, "root", int, silent)

    assert len(text) < 150_000
    names = "".join(f"!<[{i}]>" for i in range(100))
    with pytest.raises(BadGrammar, match=r"more than 40 different .* 6400 tokens"):
        to_lark(f"root ::= {names}", "root", int, silent)


@given(st.text(alphabet='rot:=" \n()[]{}|*+?.<>!\\x0a19,-#^', max_size=60))
@example("<[>")
@example("<[12>")
@example("!<[x]>")
def test_any_text_has_an_answer(text):
    """
    Well formed or BadGrammar, with a position inside the text.
    """
    position = None
    try:
        check("root ::= " + text)
    except BadGrammar as error:
        position = error.position

    assert position is None or 0 <= position <= len(text) + 9
