"""
Grammars in GBNF: gbnf.py reads the text into rules, lark.py writes them for llguidance.

libllama could follow GBNF, too, but it follows every way to read a token: 200 times `"a"?`
never ends there. llguidance refuses what takes too many of its items.
"""

from pyllama_raw.options.grammar.gbnf import parse
from pyllama_raw.options.grammar.lark import FindToken, to_lark

__all__ = ["FindToken", "parse", "to_lark"]
