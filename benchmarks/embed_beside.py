"""
The longest gap of a stream while a thousand texts become vectors in the same process.

    python -m benchmarks.embed_beside --embedder minilm.gguf

The stream has an engine of its own, and shares the thread that computes. Without --embedder
the model that generates makes the vectors, too. Gaps that began before the first vector or
ended after the last one do not count.
"""

from __future__ import annotations

import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from benchmarks.embeddings import SIZES, texts
from benchmarks.load.measure import Report, arguments, parse, percentile
from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)

PARAMS = SamplingParams(max_tokens=3000, ignore_eos=True)


async def gaps_beside(
    streams: AsyncEngine, embedder: AsyncEngine, batch: list[str]
) -> tuple[list[float], float]:
    """Gaps between tokens in milliseconds, and how many texts a second had a vector."""
    gaps: list[float] = []
    ended: list[float] = []
    started = anyio.Event()

    async def embed() -> None:
        await started.wait()
        pooling = None if embedder is not streams else "mean"
        await embedder.embed(batch, pooling=pooling)
        ended.append(time.perf_counter())

    async with anyio.create_task_group() as group:
        group.start_soon(embed)
        async with streams.generate("Count on:", PARAMS) as stream:
            last = began = 0.0
            async for _ in stream:
                now = time.perf_counter()
                if began:
                    gaps.append(1000 * (now - last))
                elif not started.is_set():
                    started.set()
                    began = now
                last = now
                if ended:
                    break
    return gaps, len(batch) / (ended[0] - began)


async def measure(report: Report) -> None:
    scheduler = SchedulerConfig(n_slots=1)
    context = ContextConfig(n_threads=report.options.threads, n_ctx=4096)
    config = EngineConfig(scheduler=scheduler, context=context)
    async with AsyncExitStack() as stack:
        streams = embedder = await stack.enter_async_context(
            AsyncEngine.open(report.options.model, config)
        )
        if report.options.embedder:
            embedder = await stack.enter_async_context(
                AsyncEngine.open(report.options.embedder, config)
            )
        for name in report.options.sizes:
            batch = texts(SIZES[name], 0, report.options.texts)
            await embedder.embed(batch[:1], pooling="mean")
            gaps, speed = await gaps_beside(streams, embedder, batch)
            worst, p99 = max(gaps), percentile(gaps, 99)
            report.add(
                texts=name,
                tokens=len(gaps),
                p99_ms=p99,
                worst_ms=worst,
                texts_per_s=speed,
            )
            target_ms = 1000 * config.scheduler.target_step_s
            report.claim(f"longest gap beside {name} texts, ms", worst, "<=", target_ms)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--embedder", type=Path, help="the model that makes vectors")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES))
    options = parse(parser)
    report = Report("embed_beside", options)
    anyio.run(measure, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
