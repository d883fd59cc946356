"""Grammars from their text, as a request makes them."""

from typing import Any

from pyllama_raw import SamplingParams
from pyllama_raw.engine.parts import at_once
from pyllama_raw.engine.sampling import Constraints, Grammars
from pyllama_raw.native.sampler import Grammar, Matcher
from pyllama_raw.native.vocab import Vocab

JSON = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def make_grammar(text: str, vocab: Vocab, **params: Any) -> Grammar:
    """At its beginning; *params* are sampling parameters."""
    constraint = Constraints(vocab).make(SamplingParams(grammar=text, **params))
    assert constraint is not None
    grammar = constraint()
    assert isinstance(grammar, Grammar)
    return grammar


def make_matcher(text: str, vocab: Vocab) -> Matcher:
    """The matcher that the grammar of *text* follows, at its beginning."""
    return Grammars(vocab).make(SamplingParams(grammar=text), at_once).args[0]
