"""
Vectors of a thousand texts: ours against llama-server's /v1/embeddings, on the same file.

    python -m scripts.make_minilm minilm.gguf
    python -m benchmarks.embeddings minilm.gguf

Short texts and long ones, each side in turn. llama-server gets all texts in one call, and one
slot for each of as many as it computes at once. The vectors of both have to be equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

from benchmarks.load.measure import Report, median_ratio
from benchmarks.peers.llama_server import llama_server
from pyllama_raw import AsyncEngine
from pyllama_raw.bench.words import generator, text

N_TEXTS, N_SLOTS = 1000, 16
SIZES = {"short": 14, "long": 140}  # words
MIN_COSINE, MIN_RATIO = 0.9999, 3.0

Vectors = NDArray[np.float32]


def texts(n_words: int, seed: int) -> list[str]:
    """Of half to one and a half times *n_words*."""
    rng = generator(n_words, seed)
    sizes = [rng.randint(n_words // 2, n_words * 3 // 2) for _ in range(N_TEXTS)]
    return [text(rng, size) for size in sizes]


def theirs(url: str, given: list[str]) -> tuple[Vectors, float]:
    """Vectors, and the seconds they took."""
    body = json.dumps({"input": given, "model": "x"}).encode()
    kind = {"Content-Type": "application/json"}
    start = time.perf_counter()
    request = urllib.request.Request(f"{url}/v1/embeddings", body, kind)  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        data = json.load(answer)["data"]
    seconds = time.perf_counter() - start
    return np.array([one["embedding"] for one in data], np.float32), seconds


async def ours(engine: AsyncEngine, given: list[str]) -> tuple[Vectors, float]:
    start = time.perf_counter()
    vectors = await engine.embed(given)
    return vectors, time.perf_counter() - start


async def measure(options: argparse.Namespace, report: Report) -> None:
    async with AsyncEngine.open(options.model) as engine:
        n_ctx, threads = engine.n_ctx_slot, engine.info.n_threads
        flags = ("--embeddings", "--batch-size", "2048", "--ubatch-size", "2048")
        sizes = {"n_slots": N_SLOTS, "n_ctx": N_SLOTS * n_ctx, "threads": threads}
        with llama_server(options.model, flags=flags, **sizes) as url:
            for name, n_words in SIZES.items():
                await compare(
                    engine, url, name, texts(n_words, 0), options.rounds, report
                )


async def compare(
    engine: AsyncEngine, url: str, name: str, n_rounds: int, report: Report
) -> None:
    given = texts(SIZES[name], seed=0)
    mine, other = [], []
    for _ in range(n_rounds):
        vectors, seconds = await ours(engine, given)
        mine.append(N_TEXTS / seconds)
        expected, seconds = await anyio.to_thread.run_sync(theirs, url, given)
        other.append(N_TEXTS / seconds)
        cosine = float((vectors * expected).sum(1).min())
        row = {"ours, texts/s": mine[-1], "llama-server, texts/s": other[-1]}
        report.add(texts=name, **row, cosine=cosine)
        report.claim(f"cosine of {name} texts", cosine, ">=", MIN_COSINE)
    ratio = median_ratio(mine, other)
    report.claim(f"speed of {name} texts", ratio, ">=", MIN_RATIO)


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    report = Report("embeddings", options)
    anyio.run(measure, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
