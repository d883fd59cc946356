"""
Terminals of GBNF, written as llguidance's Lark has them.

Each character is a terminal of its own, because llguidance takes the longest match of a
terminal where GBNF takes any.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pyllama_raw.errors import BadGrammar

# A character of GBNF; others than those that %s names stand for themselves.
CHAR = (
    r"(?:\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}"
    r'|\\[trn\\"\[\]-]|[^\\%s])'
)
MAX_CHAR = 0x10FFFF
SURROGATES = range(0xD800, 0xE000)
NOTHING = "/[a&&b]/"

_ONE_CHAR = re.compile(CHAR % "", re.DOTALL)
_RANGE = re.compile(f"({CHAR % ''})(?:-({CHAR % ''}))?", re.DOTALL)
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n"}


def characters(inside: str, position: int) -> str:
    """The string *inside* of quotes; BadGrammar at *position*: no text has it."""
    codes = [_code(char) for char in _ONE_CHAR.findall(inside)]
    for code in codes:
        if not 0 < code <= MAX_CHAR or code in SURROGATES:
            raise BadGrammar(f"no text has the character {code:#x}", position)
    return " ".join(f"/{_char(code)}/" for code in codes)


def one_of(inside: str, negated: bool) -> str:
    """One character of the set *inside* of brackets, or one that it lacks."""
    kept = [
        _of_text(_code(first), _code(last or first))
        for first, last in _RANGE.findall(inside)
    ]
    parts = [f"{_char(low)}-{_char(high)}" for low, high in kept if low <= high]
    if negated:
        return f"/[^{''.join([_char(0), *parts])}]/"
    return f"/[{''.join(parts)}]/" if parts else NOTHING


def one_token(token: int, negated: bool, silent: Collection[int]) -> str:
    """A token, or any other one; none that is *silent*."""
    if negated:
        return f"<[^{','.join(map(str, sorted({token, *silent})))}]>"
    return NOTHING if token in silent else f"<[{token}]>"


def _code(char: str) -> int:
    """The code point of a character or of an escape."""
    if len(char) > 2:
        return int(char[2:], 16)  # noqa: FURB166 - int() knows no \\u
    return ord(_ESCAPED.get(char[1], char[1]) if len(char) == 2 else char)


def _of_text(low: int, high: int) -> tuple[int, int]:
    """A range without NUL, which no token writes, and with ends that are characters."""
    if low in SURROGATES:
        low = SURROGATES.stop
    if high in SURROGATES:
        high = SURROGATES.start - 1
    return max(low, 1), min(high, MAX_CHAR)


def _char(code: int) -> str:
    return f"\\u{{{code:x}}}"
