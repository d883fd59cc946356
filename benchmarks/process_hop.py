"""
What a process for each model costs: `pyllama-raw serve --model-processes` against the same model in the
process that answers.

Batches of requests of 128 tokens in and 64 out, one and eight at a time: tokens a second, and the gaps
between what comes. Requests one after the other: what the hop adds to the time to the first token. Both
servers are open at the same time and take turns, as those of `over_http` do; both load on demand, so the one
difference is the process.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AsyncExitStack
from statistics import median

import anyio
from load.measure import (
    NO_DRAFTS,
    Report,
    arguments,
    median_ratio,
    parse,
    percentile,
    say,
)
from load.workloads import token_prompts
from over_http import N_CTX_SLOT, N_OUTPUT, N_PROMPT, N_PROMPT_ALONE, Work, in_turn
from peers.openers import running
from peers.ours import pyllama_raw_server
from peers.raw_client import http_target

from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.lab.calls import Call, Target, closed_loop

HERE, APART = "one process", "a process a model"
FLAGS = {HERE: ("--on-demand",), APART: ("--model-processes",)}
MIN_SPEED, MAX_FIRST_MS = 0.95, 5.0


async def measure(options: Namespace, report: Report) -> None:
    """Streams and single requests."""
    n_slots = max(options.streams)
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_CTX_SLOT * n_slots, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=n_slots),
    )
    async with AsyncExitStack() as stack:
        targets: dict[str, Target] = {}
        for name, flags in FLAGS.items():
            server = pyllama_raw_server(options.model, config, *flags)
            url = await stack.enter_async_context(running(server))
            opening = http_target(url, "openai")
            targets[name] = await stack.enter_async_context(opening)
        await first_tokens(options, report, targets)
        for n in options.streams:
            say(f"{n} streams")
            await streams(options, report, n, targets)


async def first_tokens(
    options: Namespace, report: Report, targets: Mapping[str, Target]
) -> None:
    """The time to the first token of requests one after the other."""
    say("single requests")

    def first_of(target: Target) -> Work:
        async def first_ms(seed: int) -> float:
            lengths = [N_PROMPT_ALONE] * options.requests
            prompts = token_prompts(options.model, ~seed, lengths)
            calls = [Call(prompt, 2) for prompt in prompts]
            return (await closed_loop(target, calls, 1)).checked().ttft_s(50) * 1e3

        return first_ms

    times = await in_turn(options, {n: first_of(t) for n, t in targets.items()})
    pairs = zip(times[APART], times[HERE], strict=True)
    added = median(apart - here for apart, here in pairs)
    add(report, "first token", "ms", times)
    report.claim("first token, ms that the hop adds, p50", added, "<=", MAX_FIRST_MS)


async def streams(
    options: Namespace, report: Report, n: int, targets: Mapping[str, Target]
) -> None:
    """Tokens a second and gaps of *n* requests at once."""
    gaps: dict[str, list[float]] = {name: [] for name in targets}

    def speed_of(name: str, target: Target) -> Work:
        async def speed(seed: int) -> float:
            prompts = token_prompts(options.model, seed, [N_PROMPT] * n)
            calls = [Call(prompt, N_OUTPUT) for prompt in prompts]
            run = (await closed_loop(target, calls, n)).checked()
            between = [gap for record in run.records for gap in record.itl_s]
            gaps[name].append(percentile(between, 50) * 1e3)
            return run.output_tok_per_s

        return speed

    speeds = await in_turn(options, {k: speed_of(k, t) for k, t in targets.items()})
    ratio = median_ratio(speeds[APART], speeds[HERE])
    add(report, f"{n} streams", "tokens/s", speeds)
    # The first round counts not.
    after = {name: times[1:] for name, times in gaps.items()}
    add(report, f"{n} streams, gap", "ms, p50", after)
    claim = f"{n} streams, tokens/s, {APART} to {HERE}"
    report.claim(claim, ratio, ">=", MIN_SPEED)


def add(
    report: Report, work: str, unit: str, figures: Mapping[str, list[float]]
) -> None:
    """A row of medians, with what they are of."""
    medians = {name: median(values) for name, values in figures.items()}
    report.add(work=work, unit=unit, **medians)
    report.details[work] = figures


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.set_defaults(rounds=10)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=8, help="single ones, a round")
    options = parse(parser)
    report = Report("process_hop", options)
    anyio.run(measure, options, report, backend_options={"use_uvloop": True})
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
