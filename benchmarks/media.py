"""
Gaps of running streams while images are encoded.

8 streams run; then 4 requests come, each with an image of its own, whose encode takes 2 s or
more alone. The projector has random weights and the width of the model. A gap is what a
reader of a stream sees between two tokens. It may have a step, and a layer of the encoder:
1.25 times target_step_s and a layer is the limit.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import anyio
import numpy as np
from load.measure import Report, arguments, parse, say
from load.workloads import token_prompts

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    Image,
    MediaConfig,
    Result,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.results import percentile

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.tiny_models.projectors import PROJECTORS, write

N_STREAMS, N_IMAGES, N_PROMPT = 8, 4, 32
N_SLOTS = N_STREAMS + N_IMAGES
N_CTX_SLOT = 2048
N_FIRST = 8  # tokens of a stream before the images come
STREAM = SamplingParams(max_tokens=N_CTX_SLOT - 64, temperature=0, ignore_eos=True)
ANSWER = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@dataclass
class Times:
    """When tokens of a stream came."""

    at: list[float] = field(default_factory=list)
    runs: anyio.Event = field(default_factory=anyio.Event)  # for some tokens

    def gaps(self, since: float, until: float) -> list[float]:
        pairs = zip(self.at, self.at[1:], strict=False)
        return [b - a for a, b in pairs if since <= b and a <= until]


@contextmanager
def projector(width: int, options: Namespace) -> Iterator[Path]:
    """A llava as deep and for images as large as *options* say."""
    shape = replace(
        PROJECTORS["llava"],
        size=options.size,
        n_layer=options.layers + 1,  # the last one is not used
        n_embd=options.embd,
        n_ff=4 * options.embd,
        n_head=options.embd // 64,
        width=width,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "projector.gguf"
        write(shape, path)
        yield path


def image(seed: int, size: int) -> Image:
    return Image(
        np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    )


async def stream(engine: AsyncEngine, prompt: list[int], times: Times) -> None:
    async with engine.generate(prompt, STREAM) as generation:
        async for _ in generation:
            times.at.append(perf_counter())
            if len(times.at) == N_FIRST:
                times.runs.set()


async def ask(engine: AsyncEngine, seed: int, size: int, into: list[Result]) -> None:
    prompt = ["Look: ", image(seed, size), " What is it?"]
    into.append(await engine.complete(prompt, ANSWER))


async def beside(
    engine: AsyncEngine, options: Namespace, index: int, alone_s: float
) -> tuple[list[float], list[float], list[Result], float]:
    """Gaps of all streams before the images and with them, their results, and seconds."""
    prompts = token_prompts(options.model, index, [N_PROMPT] * N_STREAMS)
    streams = [Times() for _ in prompts]
    results: list[Result] = []
    async with anyio.create_task_group() as running:
        for prompt, times in zip(prompts, streams, strict=True):
            running.start_soon(stream, engine, prompt, times)
        for times in streams:
            await times.runs.wait()
        begin = perf_counter()
        await anyio.sleep(min(alone_s, 2.0))
        come = perf_counter()
        async with anyio.create_task_group() as asking:
            for i in range(N_IMAGES):
                seed = 100 + index * N_IMAGES + i
                asking.start_soon(ask, engine, seed, options.size, results)
        end = perf_counter()
        running.cancel_scope.cancel()
    before = [gap for times in streams for gap in times.gaps(begin, come)]
    with_images = [gap for times in streams for gap in times.gaps(come, end)]
    return before, with_images, results, end - come


async def measure(options: Namespace, report: Report) -> None:
    from pyllama_raw.engine.capabilities import probe

    width = probe(options.model).model.n_embd
    with projector(width, options) as path:
        config = EngineConfig(
            context=ContextConfig(
                n_ctx=N_SLOTS * N_CTX_SLOT, n_threads=options.threads
            ),
            scheduler=SchedulerConfig(n_slots=N_SLOTS),
            media=MediaConfig(mmproj=path),
        )
        async with AsyncEngine.open(options.model, config) as engine:
            alone: list[Result] = []
            for seed in (1, 2):
                await ask(engine, seed, options.size, alone)
            alone_s = min(result.timings.encode_s or 0.0 for result in alone)
            layer_s = alone_s / options.layers
            say(f"an encode alone: {alone_s:.2f} s, a layer {layer_s:.3f} s")
            for index in range(options.rounds):
                say(f"round {index + 1} of {options.rounds}")
                await _round(engine, options, report, index, alone_s)
    step_s = config.scheduler.target_step_s
    longest = max(float(str(row["longest_s"])) for row in report.rows)
    report.claim("seconds of an encode alone", alone_s, ">=", options.min_encode_s)
    limit = 1.25 * (step_s + layer_s)
    report.claim("longest gap of a stream while images encode, s", longest, "<=", limit)


async def _round(
    engine: AsyncEngine,
    options: Namespace,
    report: Report,
    index: int,
    alone_s: float,
) -> None:
    n_before = engine.stats().encodes
    before, gaps, results, wall_s = await beside(engine, options, index, alone_s)
    encodes = [result.timings.encode_s or 0.0 for result in results]
    report.add(
        round=index,
        alone_s=round(alone_s, 3),
        encodes=engine.stats().encodes - n_before,
        encode_s=round(max(encodes), 3),
        wall_s=round(wall_s, 3),
        gap_before_p50_s=round(percentile(before, 50), 4),
        gap_p50_s=round(percentile(gaps, 50), 4),
        gap_p99_s=round(percentile(gaps, 99), 4),
        longest_s=round(max(gaps, default=0.0), 4),
        share=round(
            (len(gaps) / wall_s) / max(len(before) / min(alone_s, 2.0), 1e-9), 3
        ),
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=32, help="of the encoder (32)")
    parser.add_argument("--embd", type=int, default=512, help="its width (512)")
    parser.add_argument("--size", type=int, default=336, help="of images, pixels (336)")
    parser.add_argument(
        "--min-encode-s", type=float, default=2.0, help="seconds alone at least (2)"
    )
    options = parse(parser)
    report = Report("media", options)
    anyio.run(measure, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
