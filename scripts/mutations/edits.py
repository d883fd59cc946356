"""Changes of bytes and of JSON, drawn at random; what they make comes from the seed alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

Edit = Callable[[random.Random, bytearray], None]

TEXTS = (
    "",
    "a",
    "\ud800",
    "\x00",
    "user",
    "text",
    "auto",
    "none",
    "a " * 500,
    "[]",
    "-1",
)
NUMBERS = (0, 1, -1, 2, 2**31, -(2**63), 10**40, 0.5, -0.0, 1e300, True, False)
NAMES = ("type", "text", "role", "content", "function", "name", "parameters", "id", "")


def mutated(
    rng: random.Random, content: bytes, seeds: Sequence[bytes], words: Sequence[bytes]
) -> bytes:
    """
    *content* with a few edits; JSON mostly stays JSON.

    Args:
        seeds: others, of which a part may take the place of one of *content*.
        words: that the format has.
    """
    if rng.random() < 0.7 and (value := _value_of(content)) is not None:
        for _ in range(rng.choice((1, 1, 2, 4))):
            damage(rng, value, [word.decode("latin-1") for word in words])
        return json.dumps(value).encode()
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.random()
        if words and kind < 0.4:
            end = at + (rng.randrange(8) if rng.random() < 0.5 else 0)
            changed[at:end] = rng.choice(words) * rng.choice((1, 1, 1, 2, 40))
        elif kind < 0.5:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            changed[at:] = other[start:]
        elif changed:
            rng.choice(EDITS)(rng, changed)
    return bytes(changed)


def _value_of(content: bytes) -> Any:
    """The object or list that *content* is as JSON; None: it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def damage(rng: random.Random, value: Any, names: Sequence[str] = ()) -> None:
    """
    Put something else in one place of *value*, however deep.

    Args:
        names: of fields, of which one may be added.
    """
    while isinstance(value, dict | list) and (value or names):
        if names and isinstance(value, dict) and (not value or rng.random() < 0.3):
            value[rng.choice(names)] = any_value(rng, rng.randrange(4))
            return
        if not value:
            return
        places = list(value) if isinstance(value, dict) else range(len(value))
        place = rng.choice(places)
        if not isinstance(value[place], dict | list) or rng.random() < 0.3:
            value[place] = any_value(rng, rng.randrange(4))
            return
        value = value[place]


def any_value(rng: random.Random, depth: int) -> Any:
    """Anything, nested at most *depth* times."""
    kind = rng.randrange(8 if depth else 4)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return None
    inner = (any_value(rng, depth - 1) for _ in range(rng.randrange(4)))
    if kind < 6:
        return list(inner)
    return {rng.choice(NAMES): value for value in inner}


# -- bytes: each edit takes what is not empty -------------------------------------------


def flip(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice((1, 4, 32))):
        content[rng.randrange(len(content))] = rng.randrange(256)


def flip_head(rng: random.Random, content: bytearray) -> None:
    """Where formats say what follows."""
    for _ in range(rng.choice((1, 2, 4))):
        content[rng.randrange(min(len(content), 64))] = rng.choice(
            (0, 1, 127, 128, 255)
        )


def cut(rng: random.Random, content: bytearray) -> None:
    del content[max(rng.randrange(len(content)), 4) :]


def repeat(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    part = content[start : start + rng.randrange(1, 200)]
    content[start:start] = part * rng.choice((1, 2, 50))


def remove(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(4, max(len(content), 5))
    del content[start : start + rng.randrange(1, 100)]


def number(rng: random.Random, content: bytearray) -> None:
    """Four bytes are an extreme number."""
    at = rng.randrange(min(len(content), 80))
    value = rng.choice((0, 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1))
    content[at : at + 4] = value.to_bytes(4, rng.choice(("big", "little")))


EDITS: tuple[Edit, ...] = (flip, flip, flip_head, cut, repeat, remove, number)
