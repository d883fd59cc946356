"""
Writes prompts of so many tokens of one vocabulary, from seeded text.

Text depends on the seed alone. Each round can therefore have new text that no cache has
seen, and all targets get the same. A seed becomes text first, because Random(-1) would draw
what Random(1) draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from pyllama_raw.lab.bench.call import Prompt
from pyllama_raw.lab.bench.text import TEXT

WORDS = tuple(sorted(set(re.findall(r"\b[a-z]{3,}\b", TEXT))))


def generator(*seed: object) -> Random:
    """Random numbers that depend on all of *seed*."""
    return Random(repr(seed))  # noqa: S311


def text(rng: Random, n_words: int) -> str:
    """*n_words* common English words; about 1.3 tokens each."""
    return " ".join(rng.choices(WORDS, k=n_words))


class Writer:
    """Prompts as token ids, or as text for servers that take nothing else."""

    def __init__(
        self,
        tokenize: Callable[[str], Sequence[int]],
        pieces: Sequence[bytes],
        *,
        as_text: bool = False,
    ) -> None:
        """
        Args:
            tokenize: never fewer tokens than words.
            pieces: bytes of each token.
        """
        self._tokenize, self._pieces, self._as_text = tokenize, pieces, as_text

    def prompt(self, rng: Random, n_tokens: int) -> Prompt:
        """A prompt of exactly *n_tokens*; as text it may come out a few longer."""
        return self.joined([self.tokens(rng, n_tokens)])

    def tokens(self, rng: Random, n_tokens: int) -> list[int]:
        """Exactly *n_tokens* ids."""
        return list(self._tokenize(text(rng, n_tokens)))[:n_tokens]

    def text(self, rng: Random, n_tokens: int) -> str:
        """Text that goes on after other text: about *n_tokens*."""
        return " " + self.text_of(self.tokens(rng, n_tokens)).strip()

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of *tokens*."""
        return b"".join(self._pieces[token] for token in tokens).decode(errors="ignore")

    def joined(self, parts: Sequence[Sequence[int]]) -> Prompt:
        """One prompt of several runs of ids."""
        tokens = [token for part in parts for token in part]
        return self.text_of(tokens) if self._as_text else tokens


@contextmanager
def writer_for(model: Path, *, as_text: bool = False) -> Iterator[Writer]:
    """A writer in the vocabulary of *model*; only that is loaded."""
    from pyllama_raw.native.model import Model

    with Model.load(model, vocab_only=True) as loaded:
        vocab = loaded.vocab

        def tokenize(line: str) -> Sequence[int]:
            return vocab.tokenize(line, add_special=False, parse_special=False)

        yield Writer(tokenize, vocab.pieces, as_text=as_text)
