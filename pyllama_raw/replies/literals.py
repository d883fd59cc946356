"""Arguments that are literals of Python, or alike, become JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from pyllama_raw.replies.json_text import quoted
from pyllama_raw.replies.source import MARK, Broken, Delimiters, Flow, TextSource
from pyllama_raw.replies.spec import LiteralCall
from pyllama_raw.replies.tables import Tables
from pyllama_raw.replies.typed import value_of

Write = Callable[[str], None]

KEY_LIMIT = 256  # characters
WORD = re.compile(rf"""[^\s=:,(){{}}\[\]"'{MARK}]+""")
BRACKETS = {"{": ("}", "}"), "[": ("]", "]"), "(": (")", "]")}  # JSON has no tuples
ESCAPES = {"a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "'": "'", "\n": ""}
CODES = {"x": 2, "u": 4, "U": 8}  # digits of the code of a character
OBJECT = "}"


def read_literals(source: TextSource, tables: Tables, write: Write) -> Flow[None]:
    """
    Read from after the bracket before the arguments to the bracket after them.

    Broken: what follows are no literals, or the reply ends within them.
    """
    layout = tables.spec.calls and tables.spec.calls.layout
    assert isinstance(layout, LiteralCall)
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
            if not (yield from source.next(",")):
                raise Broken
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
    quote = yield from source.match(tables.literal_quotes)
    if quote:
        yield from _string(source, quote, write)
    else:
        word = yield from _word(source)
        write(f'"{quoted(word)}"')
    yield from source.space()
    if not (yield from source.next(assign)):
        raise Broken
    write(": ")
    yield from source.space()


def _word(source: TextSource) -> Flow[str]:
    """A key that has no quotes. Broken: there is none, or the reply ends within it."""
    while True:
        found = WORD.match(source.text, source.pos)
        end = found.end() if found else source.pos
        if end < len(source.text):
            break
        if source.ended or end - source.pos > KEY_LIMIT:
            raise Broken
        yield
    if not found or end - source.pos > KEY_LIMIT:
        raise Broken
    return source.take(end)


def _value(source: TextSource, tables: Tables, write: Write) -> Flow[None]:
    """Read a string, which is passed on as it comes, or a word."""
    quote = yield from source.match(tables.literal_quotes)
    if quote:
        yield from _string(source, quote, write)
        return
    found: list[str] = []
    yield from source.run(WORD, found.append)
    if not found:
        raise Broken
    write(value_of("".join(found), frozenset()))


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
        write(code_point(int(digits, 16)))
    elif n_digits or char not in {*ESCAPES, *'"\\/bfnrt'}:
        write("\\\\")  # no escape: the backslash stands for itself
        return
    else:
        write(ESCAPES.get(char, "\\" + char))
    source.take(source.pos + 1 + len(digits))


def code_point(code: int) -> str:
    """A character by its number, as a part of a string of JSON."""
    if code > 0x10FFFF:
        return "\ufffd"
    return (
        f"\\u{code:04x}"
        if code < 0x20 or 0xD800 <= code < 0xE000
        else quoted(chr(code))
    )
