"""Prompts of the scripts, by seed: each round has new text that no cache has seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from pyllama_raw.lab.workloads import generator, text, writer_for

__all__ = [
    "NOUNS",
    "Chat",
    "edit",
    "generator",
    "shared_prefix",
    "texts",
    "token_prompts",
    "turns",
]


NOUNS = ("price", "count", "limit", "width", "speed", "total", "depth", "share")


def _code(noun: str, verb: str) -> str:
    """A function, in which only the *verb* is to be changed."""
    return f"""def {verb}_{noun}(path, default):
    with open(path) as file:
        lines = file.readlines()
    for line in lines:
        name, value = line.split("=")
        if name.strip() == "{noun}":
            return float(value.strip())
    print("no {noun} in", path)
    return default
"""


def edit(noun: str, verb: str = "load") -> str:
    """Two examples of an edit, then one that is to be made."""
    parts = []
    for other in ("weight", "height", noun):
        after = _code(other, verb) if other != noun else ""
        parts.append(f"Before:\n{_code(other, 'read')}\nAfter:\n{after}")
    return "\n".join(parts)


def texts(seed: int, count: int, n_words: int) -> list[str]:
    """*count* prompts that begin differently."""
    rng = generator(seed)
    return [text(rng, n_words) for _ in range(count)]


def token_prompts(model: Path, seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of exactly so many tokens, made from seeded text."""
    rng = generator(seed)
    with writer_for(model) as writer:
        return [writer.tokens(rng, n) for n in lengths]


def shared_prefix(seed: int, count: int) -> tuple[str, list[str]]:
    """A prefix of 512 words, and *count* ends of 16 words that follow it."""
    rng = generator(seed)
    prefix = text(rng, 512)
    return prefix, [" " + text(rng, 16) for _ in range(count)]


class Chat:
    """A conversation whose every turn repeats what was said before."""

    def __init__(self, rng: Random, n_turns: int) -> None:
        first = text(rng, 300)
        self._questions = [first, *(" " + text(rng, 40) for _ in range(n_turns - 1))]
        self._text = ""

    def ask(self) -> str:
        """The prompt of the next turn."""
        self._text += self._questions.pop(0)
        return self._text

    def hear(self, answer: str) -> None:
        """The model's part of the turn."""
        self._text += answer


def turns(rng: Random, n_chats: int, n_turns: int) -> list[int]:
    """Which chat speaks when: every chat *n_turns* times, in random order."""
    order = [chat for chat in range(n_chats) for _ in range(n_turns)]
    rng.shuffle(order)
    return order
