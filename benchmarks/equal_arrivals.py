"""
Long prompts among short ones, at equal arrivals, against llama-server.

Calls come at random (Poisson), one a second: 42 tokens in and 48 out, every 6th 1,170 in
(900 words). Both get the same calls at the same moments, whatever has become of those
before; latency counts from the send. Ours is as by default, and with --turns also with prompts
that take turns; 8 slots, 8,192 cells. Two rounds of both take four minutes; a round that has not
ended after --seconds is left out.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Literal

from load.measure import NO_DRAFTS, Report, arguments, median_ratio, run_script
from load.rounds import results
from peers.openers import peer_opener

from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.lab.calls import Result
from pyllama_raw.lab.targets import Opener, Point, open_engine

Relation = Literal["<=", ">="]
N_SLOTS, N_CTX = 8, 8192
OURS, TURNS, PEER = "ours", "ours, in turns", "llama-server"


def openers(options: Namespace) -> dict[str, Opener]:
    """Ours, with both orders of prompts if they are wanted, and llama-server likewise."""
    context = ContextConfig(n_ctx=N_CTX, n_threads=options.threads)
    schedulers = {OURS: SchedulerConfig(n_slots=N_SLOTS)}
    if options.turns:
        schedulers[TURNS] = SchedulerConfig(n_slots=N_SLOTS, prefill_order="turns")
    openers_by_name: dict[str, Opener] = {
        name: partial(
            open_engine,
            options.model,
            EngineConfig(speculation=NO_DRAFTS, context=context, scheduler=scheduler),
        )
        for name, scheduler in schedulers.items()
    }
    if not options.no_peers:
        sizes = {"n_slots": N_SLOTS, "n_ctx": N_CTX, "threads": options.threads}
        openers_by_name[PEER] = peer_opener(PEER, options.model, **sizes)
    return openers_by_name


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds, each with new text and new arrivals."""
    point = Point(rate=options.rate)
    systems = openers(options)
    runs = await results(
        "interference", systems, point, options, limit_s=options.seconds
    )
    conclude(report, runs)


def figures(result: Result) -> dict[str, float]:
    """What is compared, of one run."""
    short = result["by_kind"]["short"]
    return {
        "itl_p50_s": result["median_itl_ms"] / 1e3,
        "itl_max_s": result["max_itl_ms"] / 1e3,
        "ttft_p50_s": result["median_ttft_ms"] / 1e3,
        "ttft_p99_s": result["p99_ttft_ms"] / 1e3,
        "short_ttft_p50_s": short["median_ttft_ms"] / 1e3,
        "short_ttft_p99_s": short["p99_ttft_ms"] / 1e3,
        "long_ttft_p50_s": result["by_kind"]["long"]["median_ttft_ms"] / 1e3,
        "output_tok_per_s": result["output_throughput"],
    }


def conclude(report: Report, runs: Mapping[str, list[Result]]) -> None:
    """Medians of the rounds; ratios are ours to theirs, by round."""
    figures_by_name = {
        name: [figures(run) for run in theirs] for name, theirs in runs.items()
    }
    for name, theirs in figures_by_name.items():
        report.add(
            system=name, **{key: median(f[key] for f in theirs) for key in theirs[0]}
        )
        report.details[name] = theirs
    limits: tuple[tuple[str, str, Relation, float], ...] = (
        (PEER, "itl_max_s", "<=", 1 / 15),
        (PEER, "ttft_p50_s", "<=", 1.0),
        (PEER, "ttft_p99_s", "<=", 1.0),
        (PEER, "short_ttft_p99_s", "<=", 1 / 3),
        (PEER, "output_tok_per_s", ">=", 0.97),
        (TURNS, "ttft_p50_s", "<=", 1.0),
        (TURNS, "ttft_p99_s", "<=", 1.1),
        (TURNS, "output_tok_per_s", ">=", 0.97),
    )
    for other, key, relation, limit in limits:
        if other in figures_by_name:
            ours, theirs = (
                [f[key] for f in figures_by_name[name]] for name in (OURS, other)
            )
            ratio = median_ratio(ours, theirs)
            report.claim(f"{key} to {other}", ratio, relation, limit)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--turns", action="store_true", help="prompts in turns, too")
    parser.add_argument(
        "--seconds", type=float, default=290.0, help="of all rounds, at most (290)"
    )
    parser.set_defaults(rounds=2)
    parser.add_argument("--rate", type=float, default=1.0, help="calls a second (1)")
    return run_script("equal_arrivals", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
