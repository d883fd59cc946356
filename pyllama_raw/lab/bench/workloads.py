"""
Workloads by name.

A workload makes calls from a shape and a seed. How the calls are sent, and when, is chosen
apart; a workload only says what is usual for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from pyllama_raw.lab.bench.call import Call
from pyllama_raw.lab.bench.shape import Shape
from pyllama_raw.lab.bench.writer import Writer
from pyllama_raw.lab.checked import Checked, Count, Positive

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
