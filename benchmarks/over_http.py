"""
What HTTP costs: `pyllama-raw serve` against our engine in process.

Batches of requests of 128 tokens in and 64 out, as many as there are slots, sent all at once
by the same client: tokens a second. Requests one after the other: what HTTP adds to the time
to the first token. With --embedder, lists of 64 texts: vectors a second, as numbers and as
base64. The server has a process of its own, where its engine and its HTTP share the machine
with the client, as they do in process. Both run on uvloop.

What is to be seen is smaller than what a neighbour does to a run of ten seconds: on a
shared machine the speed jumps by a third every few seconds. So both are open at the same
time and take turns; who waits has no requests. The claim is the median over the rounds.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import anyio
from load.client import EngineTarget
from load.measure import NO_DRAFTS, Report, arguments, median_ratio, parse, say
from load.workloads import texts, token_prompts
from peers.openers import running
from peers.ours import pyllama_raw_server
from peers.raw_client import RawClient, http_target
from pydantic_core import from_json

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.lab.calls import Call, Target, closed_loop

N_PROMPT, N_OUTPUT, N_CTX_SLOT, N_BATCH = 128, 64, 256, 2048
N_PROMPT_ALONE, N_OUTPUT_ALONE = 32, 2
N_TEXTS, N_WORDS = 64, 18
MIN_SPEED, MIN_VECTORS, MAX_FIRST_MS = 0.97, 0.95, 3.0

Work = Callable[[int], Awaitable[float]]  # of a seed: its figure


class Both(NamedTuple):
    """An engine in this process, and the address of one that is served."""

    engine: AsyncEngine
    url: str


@asynccontextmanager
async def both(model: Path, config: EngineConfig) -> AsyncIterator[Both]:
    """Two engines of one configuration."""
    server = pyllama_raw_server(model, config)
    async with AsyncEngine.open(model, config) as engine, running(server) as url:
        yield Both(engine, url)


async def in_turn(options: Namespace, works: Mapping[str, Work]) -> dict[str, Any]:
    """Figures by name and round; each does the same in a round, and the first one counts not."""
    figures: dict[str, list[float]] = {name: [] for name in works}
    for index in range(options.rounds + 1):
        names = list(works) if index % 2 else list(works)[::-1]
        for name in names:
            figure = await works[name](index)
            if index:
                figures[name].append(figure)
    return figures


async def measure(options: Namespace, report: Report) -> None:
    """Streams, single requests, and vectors."""
    for n_slots in options.streams:
        say(f"{n_slots} streams")
        config = EngineConfig(
            speculation=NO_DRAFTS,
            context=ContextConfig(
                n_ctx=N_CTX_SLOT * n_slots, n_threads=options.threads
            ),
            scheduler=SchedulerConfig(
                n_slots=n_slots, token_budget=N_BATCH, prefill_quantum=N_BATCH
            ),
        )
        async with (
            both(options.model, config) as pair,
            http_target(pair.url, "openai") as http,
        ):
            await streams(options, report, n_slots, EngineTarget(pair.engine), http)
            if n_slots == options.streams[0]:
                say("single requests")
                await alone(options, report, EngineTarget(pair.engine), http)
    if options.embedder is not None:
        say("vectors")
        config = EngineConfig(
            speculation=NO_DRAFTS, context=ContextConfig(n_threads=options.threads)
        )
        async with both(options.embedder, config) as pair:
            await vectors(options, report, pair)


async def streams(
    options: Namespace, report: Report, n: int, inside: Target, http: Target
) -> None:
    """Output tokens a second of *n* requests at once."""

    def speed_of(target: Target) -> Work:
        async def speed(seed: int) -> float:
            prompts = token_prompts(options.model, seed, [N_PROMPT] * n)
            calls = [Call(prompt, N_OUTPUT) for prompt in prompts]
            return (await closed_loop(target, calls, n)).checked().output_tok_per_s

        return speed

    works = {"in process": speed_of(inside), "HTTP": speed_of(http)}
    figures = await in_turn(options, works)
    conclude(report, f"{n} streams", "tokens/s", figures, MIN_SPEED)


async def alone(
    options: Namespace, report: Report, inside: Target, http: Target
) -> None:
    """What HTTP adds to the time to the first token."""

    def first_of(target: Target) -> Work:
        async def first_ms(seed: int) -> float:
            lengths = [N_PROMPT_ALONE] * options.requests
            prompts = token_prompts(options.model, ~seed, lengths)
            calls = [Call(prompt, N_OUTPUT_ALONE) for prompt in prompts]
            return (await closed_loop(target, calls, 1)).checked().ttft_s(50) * 1e3

        return first_ms

    works = {"in process": first_of(inside), "HTTP": first_of(http)}
    times = await in_turn(options, works)
    added = median(b - a for a, b in zip(*times.values(), strict=True))
    report.details["first token"] = times
    medians = {name: median(figures) for name, figures in times.items()}
    report.add(work="first token", unit="ms", **medians, ratio=None, added=added)
    report.claim("first token, ms that HTTP adds, p50", added, "<=", MAX_FIRST_MS)


async def vectors(options: Namespace, report: Report, pair: Both) -> None:
    """Texts a second, as lists of 64."""
    client = RawClient(pair.url, {})

    async def inside(seed: int) -> float:
        batch = texts(seed, N_TEXTS, N_WORDS)
        began = perf_counter()
        for _ in range(options.lists):
            await pair.engine.embed(batch)
        return options.lists * N_TEXTS / (perf_counter() - began)

    def asked(encoding: str) -> Work:
        async def speed(seed: int) -> float:
            body = {
                "input": texts(seed, N_TEXTS, N_WORDS),
                "encoding_format": encoding,
            }
            lines: list[bytes] = []
            began = perf_counter()
            for _ in range(options.lists):
                lines.clear()
                await client.post("/v1/embeddings", body, lines.append)
            took_s = perf_counter() - began
            if len(from_json(b"\n".join(lines))["data"]) != N_TEXTS:
                raise RuntimeError(f"fewer than {N_TEXTS} vectors came")
            return options.lists * N_TEXTS / took_s

        return speed

    for encoding in ("float", "base64"):
        works = {"in process": inside, "HTTP": asked(encoding)}
        figures = await in_turn(options, works)
        conclude(report, f"vectors, {encoding}", "texts/s", figures, MIN_VECTORS)


def conclude(
    report: Report, work: str, unit: str, times: dict[str, Any], limit: float
) -> None:
    """The ratio is HTTP to in process, by round."""
    ratio = median_ratio(times["HTTP"], times["in process"])
    medians = {name: median(figures) for name, figures in times.items()}
    report.add(work=work, unit=unit, **medians, ratio=ratio, added=None)
    report.details[work] = times
    report.claim(f"{work}, {unit}, HTTP to in process", ratio, ">=", limit)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.set_defaults(rounds=10)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--requests", type=int, default=8, help="single ones, a round")
    parser.add_argument("--embedder", type=Path, help="a model of vectors")
    parser.add_argument("--lists", type=int, default=4, help="of 64 texts, a round")
    options = parse(parser)
    report = Report("over_http", options)
    anyio.run(measure, options, report, backend_options={"use_uvloop": True})
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
