"""
Where tokens are chosen: the same tokens everywhere, and "auto" takes the faster place.

Equality: deterministic configuration, 8 slots, each prompt with a seed of its own, by
stage list. Speed: output tokens a second of 8 full slots, each placement in an engine of
its own, in turn. What lanes cost in a graph is in sampler_cost.py.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import anyio
from load.measure import NO_DRAFTS, Report, arguments, median_ratio, parse, say
from load.workloads import generator, token_prompts

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)

N_SLOTS, N_CTX_SLOT = 8, 512
Placement = Literal["auto", "backend", "host"]
PLACEMENTS: tuple[Placement, ...] = ("auto", "backend", "host")

GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "top_k, top_p, temperature": DRAWN,
    "defaults": {},
    "defaults, ignore_eos": {"ignore_eos": True},
    "top_k, temperature": {"top_k": 100, "top_p": 1.0, "min_p": 0.0},
    "defaults, typical": {"typical_p": 0.7},
    "defaults, xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "defaults, dynatemp": {"dynatemp_range": 0.5},
    "defaults, adaptive_p": {"adaptive_target": 0.3},
    "top_k, penalties": {
        "stages": ("top_k", "penalties", "temperature"),
        "repeat_penalty": 1.3,
    },
}
# Not served by a lane: what ends them.
OTHERS = ({"top_k": 0}, {"repeat_penalty": 1.1}, {"logprobs": 1}, {"mirostat": 2})


class Outputs(NamedTuple):
    """Of one placement."""

    tokens: list[tuple[int, ...]]
    n_on_backend: int  # requests
    n_fallbacks: int


def config(
    options: Namespace, placement: Placement, *, deterministic: bool = False
) -> EngineConfig:
    return EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_SLOTS * N_CTX_SLOT, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
        cache=CacheConfig(mode="off"),
        sampler_placement=placement,
        deterministic=deterministic,
    )


async def outputs(
    engine: AsyncEngine, prompts: Sequence[list[int]], cases: Sequence[dict[str, Any]]
) -> Outputs:
    """prompts[i] with cases[i] and the seed i, all at once."""
    tokens_by_index: dict[int, tuple[int, ...]] = {}
    placements: list[str] = []
    limiter = anyio.CapacityLimiter(2 * N_SLOTS)

    async def one(index: int) -> None:
        async with limiter:
            params = SamplingParams(**(cases[index] | {"seed": index}))
            result = await engine.complete(prompts[index], params)
        assert result.sampler is not None
        tokens_by_index[index] = result.token_ids
        placements.append(result.sampler.placement)

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    tokens = [tokens_by_index[index] for index in range(len(prompts))]
    n_fallbacks = engine.stats().lane_fallbacks
    return Outputs(tokens, placements.count("backend"), n_fallbacks)


async def compare(options: Namespace, report: Report) -> None:
    """Tokens of both places, case by case."""
    prompts = token_prompts(
        options.model, 1, [4 + i % 24 for i in range(options.prompts)]
    )
    for name, case in CASES.items():
        say(f"equality: {name}")
        cases = [case | {"max_tokens": options.max_tokens}] * len(prompts)
        both = []
        for placement in ("backend", "host"):
            settings = config(options, placement, deterministic=True)
            async with AsyncEngine.open(options.model, settings) as engine:
                both.append(await outputs(engine, prompts, cases))
        backend, host = both
        pairs = zip(backend.tokens, host.tokens, strict=True)
        n_differ = sum(first != other for first, other in pairs)
        n_missed = len(prompts) - backend.n_on_backend
        report.add(
            case=name,
            prompts=len(prompts),
            tokens=sum(map(len, host.tokens)),
            differ=n_differ,
            fallbacks=backend.n_fallbacks,
        )
        report.claim(f"differ: {name}", n_differ, "<=", 0)
        report.claim(f"not on the backend: {name}", n_missed, "<=", 0)


async def switch(options: Namespace, report: Report) -> None:
    """100 requests that take turns in kind: each is served, and told where."""
    kinds = [*CASES.values(), *OTHERS]
    generator("kinds").shuffle(kinds)
    cases = [kinds[i % len(kinds)] | {"max_tokens": 8} for i in range(100)]
    prompts = token_prompts(options.model, 2, [8] * len(cases))
    settings = config(options, "backend")
    async with AsyncEngine.open(options.model, settings) as engine:
        tokens_by_index = await outputs(engine, prompts, cases)
    report.add(
        case=f"{len(kinds)} kinds in turn", fallbacks=tokens_by_index.n_fallbacks
    )
    n_told = tokens_by_index.n_on_backend + tokens_by_index.n_fallbacks
    report.claim("told: kinds in turn", n_told, ">=", len(cases))


async def race(options: Namespace, report: Report) -> None:
    """Each placement in turn, each round in another order."""
    for name, case in (("greedy", GREEDY), ("top_k, top_p, temperature", DRAWN)):
        speeds: dict[Placement, list[float]] = {p: [] for p in PLACEMENTS}
        for index in range(options.rounds):
            say(f"speed: {name}, round {index + 1} of {options.rounds}")
            for shift in range(len(PLACEMENTS)):
                placement = PLACEMENTS[(index + shift) % len(PLACEMENTS)]
                speeds[placement].append(await speed(options, placement, case, index))
        for placement, runs in speeds.items():
            row = {"case": name, "placement": placement}
            ratio = median_ratio(speeds["auto"], runs)
            report.add(**row, output_tok_per_s=median(runs), auto_to_it=ratio)
            if placement != "auto":
                report.claim(f"auto to {placement}: {name}", ratio, ">=", 0.98)
        report.details[name] = speeds


async def speed(
    options: Namespace, placement: Placement, case: dict[str, Any], seed: int
) -> float:
    """Output tokens a second, of prompts of one micro-batch."""
    prompts = token_prompts(options.model, 100 + seed, [16] * N_SLOTS)
    fixed = case | {"ignore_eos": True, "max_tokens": options.n_timed}
    async with AsyncEngine.open(options.model, config(options, placement)) as engine:
        await outputs(engine, prompts, [fixed | {"max_tokens": 8}] * N_SLOTS)
        started = perf_counter()
        tokens_by_index = await outputs(engine, prompts, [fixed] * N_SLOTS)
        wall_s = perf_counter() - started
    return sum(map(len, tokens_by_index.tokens)) / wall_s


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--n-timed", type=int, default=96, metavar="N")
    options = parse(parser)
    report = Report("placement", options)
    anyio.run(race, options, report)
    anyio.run(switch, options, report)
    anyio.run(compare, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
