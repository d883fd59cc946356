"""Reads JSON as it comes and passes it on as it is."""

from __future__ import annotations

import contextlib
import json
import re

from pyllama_raw.replies.source import LIMIT, MARK, Broken, Flow, TextSource, Write

CLOSING = {"{": "}", "[": "]"}
SCALAR = re.compile(r"[-+.0-9Eaeflnrstu]+")  # of numbers and of true, false and null
OUTSIDE = re.compile(r"[-+.0-9Eaeflnrstu:,\s]+")  # of strings and brackets
INSIDE = re.compile(rf'[^"\\{MARK}]+')  # of a string
SHORT = re.compile(rf'"(?:[^"\\{MARK}]|\\.){{0,{LIMIT}}}"', re.DOTALL)
CONTROL = re.compile(r"[\x00-\x1f]")


def quoted(text: str) -> str:
    """*text* as a part of a string of JSON, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def pass_on(source: TextSource, write: Write) -> Flow[None]:
    """Pass on arguments. Where they break off, what follows is no part of them."""
    with contextlib.suppress(Broken):
        yield from read_value(source, write)


def read_value(source: TextSource, write: Write) -> Flow[None]:
    """Pass on one value. Broken: what follows is none; what was one so far is passed on."""
    brackets: list[str] = []
    while True:
        char = yield from source.peek()
        if char in CLOSING:
            brackets.append(CLOSING[char])
            write(source.take(source.pos + 1))
        elif brackets and char == brackets[-1]:
            brackets.pop()
            write(source.take(source.pos + 1))
        elif char == '"':
            yield from read_string(source, write)
        elif char and OUTSIDE.match(char):
            yield from source.run(OUTSIDE if brackets else SCALAR, write)
        else:
            raise Broken
        if not brackets:
            return


def read_string(source: TextSource, write: Write) -> Flow[None]:
    """Pass on one string with its quotes. Control characters, which JSON has not, are escaped."""
    write(source.take(source.pos + 1))
    while True:
        char = yield from source.peek()
        if char == '"':
            write(source.take(source.pos + 1))
            return
        if char in ("", MARK):
            raise Broken
        if char == "\\":
            escape = yield from source.ahead(2)
            write(source.take(source.pos + len(escape)))
        else:
            yield from source.run(
                INSIDE, lambda text: write(CONTROL.sub(_escaped, text))
            )


def _escaped(control: re.Match[str]) -> str:
    return quoted(control.group())


def read_short(source: TextSource) -> Flow[str]:
    """The value of a short string, as of a key. Broken: what follows is none, and stays."""
    while True:
        found = SHORT.match(source.text, source.pos)
        if found:
            try:
                value = str(json.loads(found.group(), strict=False))
            except ValueError:
                raise Broken from None
            source.take(found.end())
            return value
        unread = source.text[source.pos :]
        if source.ended or len(unread) > 2 * LIMIT + 2 or unread[:1] not in ("", '"'):
            raise Broken
        yield


def unquoted(text: str) -> str:
    """*text*, or what it says where it is a string of JSON that has JSON."""
    for closing in ("", '"') if text.startswith('"') else ():
        try:
            return str(json.loads(text + closing))
        except ValueError:
            continue
    return text
