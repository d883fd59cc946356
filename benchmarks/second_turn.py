"""
What the second turn of a chat computes where memory cannot be cut, and in llama-server.

    python -m benchmarks.second_turn

One slot, tiny models: with windows, recurrent, hybrid. A chat of 500 tokens is answered,
another prompt has the slot, and the chat comes back with 40 new tokens: after its answer
as it was said; after a prompt whose last 40 tokens are gone; or at once, before any other
prompt. Both sides tell how many tokens of that prompt they computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.load.measure import Report
from benchmarks.peers.llama_server import llama_server
from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from tests.support.tiny import HYBRID, RECURRENT, SWA, tiny_model

N_CTX, N_PROMPT, N_OTHER, N_NEW, N_OUTPUT, INTERVAL = 1024, 500, 90, 40, 8, 64
N_CUT = 40
CHATS = ("as said", "end changed", "at once")


def tokens(seed: int, n: int) -> list[int]:
    rng = Random(seed)  # noqa: S311
    return [rng.randrange(3, 250) for _ in range(n)]


def come_back(chat: str, first: list[int], output: list[int]) -> list[list[int]]:
    """What is asked after the first turn."""
    history = first[:-N_CUT] if chat == "end changed" else first + output
    between = [] if chat == "at once" else [tokens(3, N_OTHER)]
    return [*between, history + tokens(4, N_NEW)]


async def ours(model: Path, chat: str) -> int:
    """Tokens of the last prompt that our engine computed."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=N_CTX, n_threads=1),
        scheduler=SchedulerConfig(n_slots=1),
        cache=CacheConfig(snapshot_interval_tokens=INTERVAL),
    )
    params = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
    first = tokens(1, N_PROMPT)
    async with AsyncEngine.open(model, config) as engine:
        result = await engine.complete(first, params)
        for prompt in come_back(chat, first, list(result.token_ids)):
            result = await engine.complete(prompt, params)
    return result.usage.prompt_tokens - result.usage.cached_tokens


def theirs(model: Path, chat: str) -> int:
    """The same of llama-server."""
    first = tokens(1, N_PROMPT)
    with llama_server(model, n_slots=1, n_ctx=N_CTX, threads=1) as url:
        answer = complete(url, first)
        for prompt in come_back(chat, first, answer["tokens"]):
            answer = complete(url, prompt)
    return int(answer["timings"]["prompt_n"])


def complete(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "n_predict": N_OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    request = urllib.request.Request(  # noqa: S310
        f"{url}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return dict(json.load(answer))


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--models", nargs="*", metavar="NAME")
    options = parser.parse_args()
    report = Report("second_turn", options, timed=False)
    allowed = N_NEW + INTERVAL
    for recipe in (*SWA, *RECURRENT, *HYBRID):
        if options.models and recipe.name not in options.models:
            continue
        model = tiny_model(recipe.name)
        for chat in CHATS:
            n_ours, n_theirs = anyio.run(ours, model, chat), theirs(model, chat)
            row = {"model": recipe.name, "chat": chat}
            report.add(**row, ours=n_ours, **{"llama-server": n_theirs})
            report.claim(f"{recipe.name}, {chat}", n_ours, "<=", allowed)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
