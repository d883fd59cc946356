"""
Workloads by name, the prompts of their calls, of so many tokens of one vocabulary, and recorded
requests as calls.

A workload makes calls from a shape and a seed. How the calls are sent, and when, is chosen
apart; a workload only says what is usual for it.

Text depends on the seed alone. Each round can therefore have new text that no cache has
seen, and all targets get the same. A seed becomes text first, because Random(-1) would draw
what Random(1) draws. Words come from stories, facts and code, by which perplexities are compared,
too.

Where a trace has only lengths, prompts are seeded text that nothing repeats; equal hash_ids of
one seed are equal blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Annotated

from pydantic import Field

from pyllama_raw.errors import ConfigError, shown
from pyllama_raw.lab.arrivals import Arrival
from pyllama_raw.lab.calls import Call, Prompt
from pyllama_raw.options.frozen import Checked, Count, Positive, Whole

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


@dataclass(frozen=True, slots=True)
class Shape(Checked):
    """Sizes of a workload; 0 where it has no such thing."""

    requests: Whole = 0
    prompt_tokens: Whole = 0  # of each call, beside a prefix; sharegpt: median
    output_tokens: Whole = 0  # of each call; sharegpt: median
    prefix_tokens: Whole = 0  # that calls share, or a chat begins with
    groups: Whole = 0  # prefixes
    turns: Whole = 0  # of each chat; requests are the chats
    every: Whole = 0  # each call of so many is long
    long_tokens: Whole = 0  # in its prompt
    # Of clients that leave early.
    leave_share: Annotated[float, Field(ge=0, le=1)] = 0.0

    def changed(self, changes: Mapping[str, int | float]) -> Shape:
        """
        This shape with what is *changes*.

        Raises:
            ConfigError: the workload has no such thing, or the number is not allowed.
        """
        for name, value in changes.items():
            if not getattr(self, name, 0):
                names = [f.name for f in fields(self) if getattr(self, f.name)]
                raise ConfigError(f"{name}={shown(value)}: this workload has {names}")
            if name != "leave_share" and value == 0:
                raise ConfigError(f"{name}=0: give at least 1")
        return replace(self, **changes)  # type: ignore[arg-type]


SHAREGPT_SIGMA = 1.0  # of the logarithm of lengths
SHAREGPT_MOST = 1024  # tokens, of prompts and of outputs


Build = Callable[[Shape, Writer, Random], list[Call]]


@dataclass(frozen=True, slots=True)
class BenchWorkload(Checked):
    """A way to make calls, with what is usual for it."""

    name: str
    about: str
    shape: Shape
    calls: Build  # in the order they are sent
    clients: Count | None = 8  # closed loop; None: open
    rate: Positive = 1.0  # open loop: calls a second
    burstiness: Positive = 1.0  # open loop


def prompts(shape: Shape, writer: Writer, rng: Random) -> list[Call]:
    """Prompts of one length, each behind one of the prefixes if there are some."""
    groups = [writer.tokens(rng, shape.prefix_tokens) for _ in range(shape.groups or 1)]
    calls = []
    for index in range(shape.requests):
        own = writer.tokens(rng, shape.prompt_tokens)
        prompt = writer.joined([groups[index % len(groups)], own])
        calls.append(Call(prompt, shape.output_tokens))
    return calls


def prefix_groups(shape: Shape, writer: Writer, rng: Random) -> list[Call]:
    """Prefixes that are used equally often, in random order."""
    calls = prompts(shape, writer, rng)
    rng.shuffle(calls)
    return calls


def multi_turn(shape: Shape, writer: Writer, rng: Random) -> list[Call]:
    """Chats whose turns come in random order, each after the one before it."""
    order = [chat for chat in range(shape.requests) for _ in range(shape.turns)]
    rng.shuffle(order)
    latest: dict[int, int] = {}
    calls = []
    for index, chat in enumerate(order):
        first = chat not in latest
        n_tokens = shape.prefix_tokens if first else shape.prompt_tokens
        prompt = writer.text(rng, n_tokens)
        kind = "first turn" if first else "later turn"
        calls.append(
            Call(prompt, shape.output_tokens, after=latest.get(chat), kind=kind)
        )
        latest[chat] = index
    return calls


def sharegpt(shape: Shape, writer: Writer, rng: Random) -> list[Call]:
    """Log-normal lengths, prompts and outputs independent of each other."""

    def length(middle: int) -> int:
        number = rng.lognormvariate(math.log(middle), SHAREGPT_SIGMA)
        return min(max(round(number), 1), SHAREGPT_MOST)

    return [
        Call(
            writer.prompt(rng, length(shape.prompt_tokens)), length(shape.output_tokens)
        )
        for _ in range(shape.requests)
    ]


def interference(shape: Shape, writer: Writer, rng: Random) -> list[Call]:
    """Short prompts, and a long one after every so many."""
    calls = []
    for index in range(shape.requests):
        is_long = index % shape.every == shape.every - 1
        n_tokens = shape.long_tokens if is_long else shape.prompt_tokens
        kind = "long" if is_long else "short"
        prompt = writer.prompt(rng, n_tokens)
        calls.append(Call(prompt, shape.output_tokens, kind=kind))
    return calls


def cancel_storm(shape: Shape, writer: Writer, rng: Random) -> list[Call]:
    """Prompts of one length; some clients leave in the first half of their output."""
    calls = []
    for call in prompts(shape, writer, rng):
        if rng.random() < shape.leave_share:
            leave = rng.randint(1, max(call.max_tokens // 2, 1))
            calls.append(replace(call, leave_after=leave, kind="leaves"))
        else:
            calls.append(replace(call, kind="stays"))
    return calls


WORKLOADS = {
    workload.name: workload
    for workload in (
        BenchWorkload(
            "offline",
            "prompts of one length, all wanted as soon as possible",
            Shape(requests=32, prompt_tokens=128, output_tokens=64),
            prompts,
        ),
        BenchWorkload(
            "shared-prefix",
            "one long prefix, an end of its own for each",
            Shape(requests=32, prefix_tokens=640, prompt_tokens=20, output_tokens=32),
            prompts,
        ),
        BenchWorkload(
            "prefix-groups",
            "several shared prefixes in random order",
            Shape(
                requests=32,
                groups=4,
                prefix_tokens=512,
                prompt_tokens=32,
                output_tokens=32,
            ),
            prefix_groups,
        ),
        BenchWorkload(
            "multi-turn",
            "chats in random order; a turn repeats all before, answers included",
            Shape(
                requests=24,
                turns=3,
                prefix_tokens=384,
                prompt_tokens=52,
                output_tokens=24,
            ),
            multi_turn,
        ),
        BenchWorkload(
            "sharegpt",
            "log-normal lengths as in ShareGPT, at most 1024 each way",
            Shape(requests=32, prompt_tokens=200, output_tokens=200),
            sharegpt,
        ),
        BenchWorkload(
            "interference",
            "short prompts; every N-th is long",
            Shape(
                requests=48,
                prompt_tokens=42,
                output_tokens=48,
                every=6,
                long_tokens=1170,
            ),
            interference,
            clients=None,
        ),
        BenchWorkload(
            "bursts",
            "short prompts that come in bursts",
            Shape(requests=48, prompt_tokens=64, output_tokens=32),
            prompts,
            clients=None,
            burstiness=0.25,
        ),
        BenchWorkload(
            "memory-pressure",
            "outputs outgrow the cells: half of what the slots would need",
            Shape(requests=24, prompt_tokens=64, output_tokens=192),
            prompts,
        ),
        BenchWorkload(
            "cancel-storm",
            "some clients leave after some tokens",
            Shape(requests=64, prompt_tokens=64, output_tokens=64, leave_share=0.5),
            cancel_storm,
        ),
    )
}


def calls_of(
    arrivals: Iterable[Arrival],
    writer: Writer,
    *seed: object,
    speed: float = 1.0,
    length_scale: float = 1.0,
) -> list[Call]:
    """
    Calls for *arrivals*.

    Args:
        speed: 2 replays in half the time.
        length_scale: prompts, blocks and outputs become so many times as long.
    """
    calls = []
    for index, arrival in enumerate(arrivals):
        prompt = _prompt(arrival, writer, length_scale, seed, index)
        n_output = _scaled(arrival.n_output, length_scale)
        calls.append(
            Call(prompt, n_output, arrival.at_s / speed, **arrival.fields_of_call)
        )
    return calls


def _prompt(
    arrival: Arrival, writer: Writer, scale: float, seed: object, index: int
) -> Prompt:
    if arrival.prompt is not None:
        return arrival.prompt
    n_left = _scaled(arrival.n_prompt, scale)
    if not arrival.blocks:
        return writer.prompt(generator(seed, "call", index), n_left)
    parts = []
    for block in arrival.blocks:
        n_block = min(_scaled(arrival.block, scale), n_left)
        parts.append(writer.tokens(generator(seed, "block", block), n_block))
        n_left -= n_block
    parts.append(writer.tokens(generator(seed, "call", index), n_left))
    return writer.joined(parts)


def _scaled(count: int, scale: float) -> int:
    return max(round(count * scale), 1)
