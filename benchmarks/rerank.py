"""
Scores of rerankers: ours are near llama-server's, and the order is the same.

    python -m benchmarks.rerank [--write tests/snapshots/rerank.json]

Tiny models with heads, or those that are named. What llama-server says can be written to a
file, which the tests compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from benchmarks.load.measure import Report
from benchmarks.peers.llama_server import llama_server
from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig
from scripts.make_tiny_models import make

NAMES = ("bert-rank", "bert-labels", "qwen3-rank")
PAIRS = {
    "what is a panda": [
        "hello",
        "the panda is a bear",
        "to be or not to be",
        "a",
        "pandas eat bamboo",
    ],
    "Z": ["Z", "z", "0 1 2 3 4 5 6 7 8 9", "panda " * 40],
}
MAX_DIFFERENCE = 3.5e-3  # of a score: queries and sums are rounded to 16 bits there


def theirs(url: str, query: str, documents: list[str]) -> list[float]:
    """A score for each document, in their order."""
    body = json.dumps({"query": query, "documents": documents, "model": "x"}).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/rerank", body, kind)  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        rows = json.load(answer)["results"]
    scores = {row["index"]: float(row["relevance_score"]) for row in rows}
    return [scores[index] for index in range(len(documents))]


async def ours(model: Path, query: str, documents: list[str]) -> list[float]:
    config = EngineConfig(context=ContextConfig(n_threads=1))
    async with AsyncEngine.open(model, config) as engine:
        ranked = await engine.rank(query, documents)
    scores = {document.index: document.score for document in ranked}
    return [scores[index] for index in range(len(documents))]


def compare(model: Path, report: Report) -> list[list[float]]:
    """Claims that scores and order are the same; returns llama-server's."""
    errors = []
    flags = ("--reranking", "--batch-size", "1024", "--ubatch-size", "1024")
    with llama_server(model, n_slots=2, n_ctx=2048, threads=1, flags=flags) as url:
        for query, documents in PAIRS.items():
            expected = theirs(url, query, documents)
            scores = anyio.run(ours, model, query, documents)
            largest = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
            same = order(scores) == order(expected)
            row = {"model": model.stem, "query": query}
            report.add(**row, difference=f"{largest:.1e}", same_order=same)
            report.claim(f"difference, {model.stem}", largest, "<=", MAX_DIFFERENCE)
            report.claim(f"same order, {model.stem}", float(same), ">=", 1)
            errors.append(expected)
    return errors


def order(scores: list[float]) -> list[int]:
    """Of the documents, the best first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--write", metavar="FILE", type=Path, help="for the tests")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    report = Report("rerank", options, timed=False)
    with TemporaryDirectory() as folder:
        models = options.models
        if not models:
            make(Path(folder), list(NAMES))
            models = [Path(folder, f"{name}.gguf") for name in NAMES]
        results = {path.stem: compare(path, report) for path in models}
    if options.write:
        record = {"pairs": PAIRS, "scores": results}
        options.write.write_text(json.dumps(record, indent=1) + "\n")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
