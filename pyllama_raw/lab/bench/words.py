"""
Seeded text.

Text depends on the seed alone. Each round can therefore have new text that no cache has
seen, and all targets get the same. A seed becomes text first, because Random(-1) would draw
what Random(1) draws.
"""

from __future__ import annotations

import re
from random import Random

from pyllama_raw.lab.bench.text import TEXT

WORDS = tuple(sorted(set(re.findall(r"\b[a-z]{3,}\b", TEXT))))


def generator(*seed: object) -> Random:
    """Random numbers that depend on all of *seed*."""
    return Random(repr(seed))  # noqa: S311


def text(rng: Random, n_words: int) -> str:
    """*n_words* common English words; about 1.3 tokens each."""
    return " ".join(rng.choices(WORDS, k=n_words))
