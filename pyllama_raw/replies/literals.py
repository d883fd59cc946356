"""Arguments that are literals of Python, or alike, become JSON."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from pyllama_raw.replies.json_text import quoted
from pyllama_raw.replies.source import (
    MARK,
    Broken,
    Delimiters,
    Flow,
    TextSource,
    Write,
)
from pyllama_raw.replies.spec import LiteralCall
from pyllama_raw.replies.tables import Tables
from pyllama_raw.replies.typed import value_of

WORD = re.compile(rf"""[^\s=:,(){{}}\[\]"'{MARK}]+""")
BRACKETS = {"{": ("}", "}"), "[": ("]", "]"), "(": (")", "]")}  # JSON has no tuples
ESCAPES = {"a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "'": "'", "\n": ""}
CODES = {"x": 2, "u": 4, "U": 8}  # digits of the code of a character
OBJECT = "}"


def read_literals(
    source: TextSource, tables: Tables, layout: LiteralCall, write: Write
) -> Flow[None]:
    """
    Read from after the bracket before the arguments to the bracket after them.

    Broken: what follows are no literals, or the reply ends within them.
    """
    closing: list[tuple[str, str]] = [(layout.close, OBJECT)]
    empty = True  # nothing is in the innermost brackets
    write("{")
    while closing:
        yield from source.space()
        end, json_end = closing[-1]
        if (yield from source.next(end)):
            write(json_end)
            closing.pop()
            empty = False
            continue
        if not empty:
            yield from source.expect(",")
            yield from source.space()
            if (yield from source.peek()) == end:
                continue
            write(", ")
        if json_end == OBJECT:
            assign = layout.assign if len(closing) == 1 else ":"
            yield from _key(source, tables, assign, write)
        bracket = BRACKETS.get((yield from source.peek()))
        empty = bracket is not None
        if bracket:
            source.take(source.pos + 1)
            write("{" if bracket[1] == OBJECT else "[")
            closing.append(bracket)
        else:
            yield from _value(source, tables, write)


def _key(source: TextSource, tables: Tables, assign: str, write: Write) -> Flow[None]:
    """Read a key and what comes between the key and its value."""
    quote = yield from source.match(tables.quotes)
    if quote:
        yield from _string(source, quote, write)
    else:
        word = yield from _word(source)
        write(f'"{quoted(word)}"')
    yield from source.space()
    yield from source.expect(assign)
    write(": ")
    yield from source.space()


def _value(source: TextSource, tables: Tables, write: Write) -> Flow[None]:
    """Read a string, which is passed on as it comes, or a word."""
    quote = yield from source.match(tables.quotes)
    if quote:
        yield from _string(source, quote, write)
    else:
        word = yield from _word(source)
        write(value_of(word, frozenset()))


def _word(source: TextSource) -> Flow[str]:
    """A word that has no quotes. Broken: there is none."""
    found: list[str] = []
    yield from source.run(WORD, found.append)
    if not found:
        raise Broken
    return "".join(found)


def _string(source: TextSource, quote: str, write: Write) -> Flow[None]:
    """Read a string from after the *quote* at its beginning to that at its end."""
    ends = _ends(quote)
    write('"')
    while True:
        end = yield from source.until(ends, lambda text: write(quoted(text)))
        if end == quote:
            break
        if not end:
            raise Broken
        yield from _escape(source, write)
    write('"')


@lru_cache(maxsize=64)
def _ends(quote: str) -> Delimiters:
    return Delimiters([quote, "\\"] if quote[0] in "\"'" else [quote])


def _escape(source: TextSource, write: Write) -> Flow[None]:
    """Read an escape of Python from after its backslash."""
    char = yield from source.peek()
    n_digits = CODES.get(char, 0)
    digits = (yield from source.ahead(1 + n_digits))[1:]
    if len(digits) == n_digits > 0 and re.fullmatch("[0-9a-fA-F]+", digits):
        code = int(digits, 16)
        write(json.dumps(chr(code))[1:-1] if code <= 0x10FFFF else "\ufffd")
    elif n_digits or char not in {*ESCAPES, *'"\\/bfnrt'}:
        write("\\\\")  # no escape: the backslash stands for itself
        return
    else:
        write(ESCAPES.get(char, "\\" + char))
    source.take(source.pos + 1 + len(digits))
