"""Grammars from their text, as a request makes them."""

from typing import Any

from pyllama_raw import SamplingParams
from pyllama_raw.engine.constraint import GrammarConstraint
from pyllama_raw.native.grammar import Grammar
from pyllama_raw.native.vocab import Vocab


def make_grammar(text: str, vocab: Vocab, **more: Any) -> Grammar:
    """At its beginning; *more* are sampling parameters."""
    return GrammarConstraint(SamplingParams(grammar=text, **more), vocab).start()
