"""
Drafts make copies and forms faster, and cost chats nothing.

An engine of default options, which has drafts, and one without do the same work in turn, at 1, 4 and 8 streams: edits of a
text that the prompt has, JSON by a schema with fixed keys, and chats of other topics. Outputs are
greedy; where they differ, the tokens of each engine count. Each round has a salt of its own, so its
requests see each other's texts and no earlier round's. After half of the rounds both engines are opened
anew, the other one first: on some machines the weights of the second one lie in worse memory, and it
is 5 % slower. A ratio is the geometric mean of the medians of both halves.

With --draft the second engine has a draft model, too; `python -m scripts.large_models DIRECTORY
--widen MODEL` makes a model to which MODEL is one. With --cpu seconds are those of CPUs, prompts
included, for machines that others use.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from statistics import geometric_mean, median
from time import perf_counter, process_time
from typing import Any

from load.measure import Report, arguments, median_ratio, run_script, say
from load.workloads import NOUNS, edit

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)

N_SLOTS, N_CTX_SLOT, N_PROMPTS = 8, 1024, 8
STREAMS = (1, 4, 8)
LIMITS = {  # by work and streams
    ("edits", 1): 1.6,
    ("edits", 4): 1.2,
    ("JSON", 1): 1.3,
    **{("chats", n): 0.98 for n in STREAMS},
}
LIMITS_OF_DRAFT = {("chats", 1): 1.2}  # of one of a quarter of the size
TOPICS = (
    "why the sky is blue", "how bread is baked", "what a violin is made of",
    "the history of paper", "how bees find flowers", "what makes steel hard",
    "why leaves turn red", "how a lock on a canal works",
)  # fmt: skip
KEYS = ("first_name", "family_name", "date_of_birth", "favourite_colour", "home_town")
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "string", "maxLength": 12} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}


WORKS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "edits": ([edit(noun) for noun in NOUNS], {"max_tokens": 96, "ignore_eos": True}),
    "JSON": (
        [f"A person who knows {topic}, as JSON: " for topic in TOPICS],
        {"max_tokens": 120, "json_schema": SCHEMA},
    ),
    "chats": (
        [[{"role": "user", "content": f"Tell me {topic}."}] for topic in TOPICS],
        {"max_tokens": 96, "ignore_eos": True},
    ),
}


def config(options: Namespace, mode: str) -> EngineConfig:
    draft = options.draft if mode == "draft" else None
    return EngineConfig(
        context=ContextConfig(n_ctx=N_SLOTS * N_CTX_SLOT, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
        speculation={"mode": mode, "draft": draft},
    )


async def speed(
    engine: AsyncEngine,
    prompts: Sequence[Any],
    params: SamplingParams,
    n_streams: int,
    salt: str,
    *,
    cpu: bool,
) -> float:
    """Output tokens a second, *n_streams* at a time, without the time of prompts if not *cpu*."""
    n_tokens, seconds = 0, 0.0
    clock = process_time if cpu else perf_counter
    for start in range(0, len(prompts), n_streams):
        started = clock()
        results = await engine.complete_many(
            prompts[start : start + n_streams], params, cache_salt=salt
        )
        took_s = clock() - started
        if cpu:
            n_tokens += sum(len(result.token_ids) for result in results)
            seconds += took_s
            continue
        first_s = max(result.timings.ttft_s or 0.0 for result in results)
        n_tokens += sum(len(result.token_ids) - 1 for result in results)
        seconds += took_s - first_s
    return n_tokens / seconds


@dataclass
class Cell:
    """One work at one number of streams: what all rounds have measured."""

    work: str
    n_streams: int
    ratios: list[float] = field(default_factory=list)  # a half of the rounds each
    speeds: dict[str, list[float]] = field(default_factory=dict)  # by mode
    counts: Counter[str] = field(default_factory=Counter)  # of the engine that drafts


async def measure(options: Namespace, report: Report) -> None:
    """Two halves, with engines of their own."""
    drafting, limits = ("draft", LIMITS_OF_DRAFT) if options.draft else ("auto", LIMITS)
    cells = [Cell(work, n) for work, n in product(options.works, options.streams)]
    for modes in (("off", drafting), (drafting, "off")):
        async with AsyncExitStack() as stack:
            engines = {
                mode: await stack.enter_async_context(
                    AsyncEngine.open(options.model, config=config(options, mode))
                )
                for mode in modes
            }
            for cell in cells:
                await half(cell, engines, drafting, options)
    for cell in cells:
        ratio = geometric_mean(cell.ratios)
        report.add(
            work=cell.work,
            streams=cell.n_streams,
            **{mode: median(cell.speeds[mode]) for mode in ("off", drafting)},
            ratio=ratio,
            **cell.counts,
        )
        if (limit := limits.get((cell.work, cell.n_streams))) is not None:
            report.claim(f"{cell.work}, {cell.n_streams}", ratio, ">=", limit)


async def half(
    cell: Cell, engines: Mapping[str, AsyncEngine], drafting: str, options: Namespace
) -> None:
    """Half of the rounds. One more before them warms up, and drafts learn what steps take."""
    prompts, fields = WORKS[cell.work]
    params = SamplingParams(temperature=0, seed=0, **fields)
    before = engines[drafting].stats()
    speeds: dict[str, list[float]] = {mode: [] for mode in engines}
    for turn in range((options.rounds + 1) // 2 + 1):
        for mode in list(engines) if turn % 2 else list(engines)[::-1]:
            tokens_s = await speed(
                engines[mode],
                prompts[: options.prompts or N_PROMPTS],
                params,
                cell.n_streams,
                f"{cell.n_streams} {turn}",
                cpu=options.cpu,
            )
            if turn:
                speeds[mode].append(tokens_s)
    after = engines[drafting].stats()
    cell.ratios.append(median_ratio(speeds[drafting], speeds["off"]))
    for mode, values in speeds.items():
        cell.speeds.setdefault(mode, []).extend(values)
    cell.counts.update(
        drafted=after.drafted_tokens - before.drafted_tokens,
        accepted=after.accepted_tokens - before.accepted_tokens,
        output=after.output_tokens - before.output_tokens,
        steps=after.steps - before.steps,
    )
    say(f"{cell.work}, {cell.n_streams} streams: {cell.ratios[-1]:.3f}")


if __name__ == "__main__":
    parser = arguments(__doc__)
    text = "at a time (1 4 8)"
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help=text)
    parser.add_argument("--works", nargs="+", default=tuple(WORKS), choices=WORKS)
    parser.add_argument("--prompts", type=int, help="of each work, at most 8 (8)")
    parser.add_argument("--draft", metavar="MODEL", help="a draft model (none)")
    parser.add_argument("--cpu", action="store_true", help="seconds of CPUs")
    sys.exit(run_script("speculation", measure, parser))
