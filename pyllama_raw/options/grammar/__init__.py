"""
Grammars in GBNF, written as Lark grammars for llguidance.

libllama could follow GBNF, too, but it follows every way to read a token: 200 times `"a"?`
never ends there. llguidance refuses what takes too many of its items.
"""

from pyllama_raw.options.grammar.gbnf import to_lark

__all__ = ["to_lark"]
