"""
Grammars in GBNF: from their text to a program that names the tokens that may come next.

gbnf.py reads the text into rules, program.py makes nodes of them that read bytes, and
left_recursion.py refuses what would never end. The nodes are followed in C++
(_ffi/grammar): places that are the same are one, what follows a byte is looked for once,
and the vocabulary is walked in the order of its texts.

Two others could follow GBNF, and neither holds.

- libllama follows every way to read a token, so 200 times `"a"?` never ends there.
- llguidance carries JSON schemas, patterns and Lark grammars here. Of the grammars in
  tests/native/grammar it fails "ambiguous". One mask of 49,000 tokens took 1.1 s for "many
  optional", 6.4 s for "long optional" and 3.6 ms for JSON.

Bounds: a text has 2**15 items, and again with repetitions written out; parentheses are 100
deep; a program has 2**16 nodes; a token looks at 250,000 places (about 20 ms), and a row that
needs more fails alone.
"""

from __future__ import annotations

from pyllama_raw.options.grammar.gbnf import parse
from pyllama_raw.options.grammar.program import FindToken, Program, compile_rules

__all__ = ["FindToken", "Program", "compile_grammar"]


def compile_grammar(text: str, root: str, find_token: FindToken) -> Program:
    """
    The program of *text* that begins with the rule *root*.

    Args:
        find_token: the id of the one token that an id or a name like <think> stands for.

    Raises:
        BadGrammar: not GBNF, too large, left-recursive, or a name of no token; with an index
            into the text where there is one place.
    """
    return compile_rules(parse(text, root), find_token)
