"""
Writes prompts of so many tokens of one vocabulary, from seeded text.

Text depends on the seed alone. Each round can therefore have new text that no cache has
seen, and all targets get the same. A seed becomes text first, because Random(-1) would draw
what Random(1) draws. Words come from stories, facts and code, by which perplexities are compared,
too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from pyllama_raw.lab.bench.call import Prompt

TEXT = """\
The harbour was still dark when Anna carried the last crate down to the boat. Her brother
had promised to help, but he was asleep, as he always was when something heavy had to be
moved. She did not mind. The air smelled of salt and diesel, and the first gulls were
already quarrelling over the nets. By the time the sun came up behind the island, she was
far out, and the town was only a thin line of roofs between the water and the hills.

"You could have waited for me," he said when she came back in the afternoon.

"I waited for an hour," she said. "The fish did not."

Bread needs only four things: flour, water, salt and time. Mix five hundred grams of flour
with three hundred and fifty grams of warm water, ten grams of salt and a little yeast.
Fold the dough every half hour for three hours, shape it, and let it rest overnight in a
cold place. In the morning, heat the oven as far as it will go. Bake the loaf for forty
minutes; it is done when it sounds hollow if you knock on it from below.

Rivers shape the land in two ways. Where the water is fast it takes stones and sand away,
and where it is slow it puts them down again. A bend grows because the outer bank is eaten
by the current while mud collects on the inner one. After some hundred years the bend is
so wide that the river breaks through its neck in a flood, and a lake in the form of a
half moon stays behind. The water of the Earth is always on its way: it rises from the
sea, falls on the mountains as rain or snow, and comes back in the rivers.

A computer stores a number as a row of bits. With eight bits it can tell 256 values
apart, with sixteen 65,536, and every further bit doubles the count. Fractions are harder.
One tenth has no end when it is written in base two, so a machine keeps the nearest value
it has, and a sum of ten tenths may differ from one in its last digit. For this reason
one never asks whether two such sums are equal, but whether they are close.

def mean(values):
    \"\"\"Return the arithmetic mean of a list of numbers.\"\"\"
    if not values:
        raise ValueError("the mean of nothing is not defined")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

The meeting begins at nine o'clock on Tuesday in the large room on the second floor. Please
send your questions to Mr. Keller before Friday. The agenda has three points: the budget
for next year, the new building, and the date of the summer party. Coffee and tea will be
served at ten. If you cannot come, let us know, so that we can send you the minutes.

Once upon a time there was a king who wanted to know how large his land was. He sent out
three riders, one to the north, one to the east and one to the south. The first came back
after a year and said that he had found only snow. The second came back after two years
and said that the road had no end. The third never came back, but every spring a bird sat
at the king's window and sang a song that nobody in the castle had ever heard before.
"""
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
