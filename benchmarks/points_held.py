"""
How many points of prompts one limit of host memory holds where memory cannot be cut.

    python -m benchmarks.points_held

One slot, tiny models: with windows, and hybrid. Prompts of 2,000 tokens at the default interval:
each for itself; with 1,700 tokens in common; and chats that grow by 200 tokens a turn. All are
asked, then each again with another end. A run of an earlier commit tells what it held.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import anyio

from benchmarks.load.measure import Report
from benchmarks.second_turn import tokens
from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from tests.tiny import HYBRID, SWA, tiny_model

N_CTX, N_PROMPT, N_COMMON, N_TURN, N_END, N_PROMPTS = 4096, 2000, 1700, 200, 40, 24
MAX_BYTES = 3 * 2**20


def apart() -> list[list[int]]:
    """Prompts that have nothing in common."""
    return [tokens(i, N_PROMPT) for i in range(N_PROMPTS)]


def alike() -> list[list[int]]:
    """Prompts with the same beginning."""
    common = tokens(0, N_COMMON)
    return [common + tokens(i + 1, N_PROMPT - N_COMMON) for i in range(N_PROMPTS)]


def chats() -> list[list[int]]:
    """The turns of some chats, one chat after the other."""
    n_turns = N_PROMPT // N_TURN
    texts = [tokens(i, N_PROMPT) for i in range(N_PROMPTS // 4)]
    return [text[: (i + 1) * N_TURN] for text in texts for i in range(n_turns)]


LOADS = {"apart": apart, "alike": alike, "chats": chats}


async def play(model: Path, prompts: list[list[int]]) -> tuple[int, int]:
    """Points held in the end, and tokens that the second asking did not compute."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=N_CTX, n_threads=1),
        scheduler=SchedulerConfig(n_slots=1),
        cache=CacheConfig(max_bytes=MAX_BYTES),
    )
    params = SamplingParams(max_tokens=1, temperature=0)
    async with AsyncEngine.open(model, config) as engine:
        for prompt in prompts:
            await engine.complete(prompt, params)
        n_held, n_reused = (await engine.cache_stats()).n_entries, 0
        for prompt in reversed(prompts):
            question = prompt[:-N_END] + tokens(99, N_END)
            result = await engine.complete(question, params)
            n_reused += result.usage.cached_tokens
    return n_held, n_reused


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--models", nargs="*", metavar="NAME")
    options = parser.parse_args()
    report = Report("points_held", options, timed=False)
    for recipe in (*HYBRID, *SWA):
        if options.models and recipe.name not in options.models:
            continue
        for load, prompts in LOADS.items():
            n_held, n_reused = anyio.run(play, tiny_model(recipe.name), prompts())
            report.add(model=recipe.name, load=load, held=n_held, reused=n_reused)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
