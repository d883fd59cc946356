"""
`pyllama-raw serve` against llama-server, both over HTTP.

Loads, each in interleaved rounds: many short requests (32 tokens in and out, 8 clients),
longer ones (128 in, 64 out), requests that share a prefix of 640 tokens (8 clients), and long
prompts among short ones at random arrivals, where the longest gap of a stream counts. Both are
streamed from by one client over /v1/completions, with 8 slots and 8,192 cells; ours is as by
default.

llama-server is what benchmarks/peers/setup builds; CC and CXX, or LLAMA_SERVER, name another
build, so give the one that is the fastest on the machine. It runs with each of --settings
(docs/measuring.md), and ours is compared with the best of them.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal, NamedTuple

from load.measure import NO_DRAFTS, Report, arguments, median_ratio, run_script, say
from load.rounds import results
from peers.batched_bench import OWN, SETTINGS
from peers.openers import peer_opener, served_opener

from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.lab.calls import Result
from pyllama_raw.lab.targets import Opener, Point

N_SLOTS, N_CTX = 8, 8192
OURS, PEER = "ours", "llama-server"
DEFAULT = "repack"  # what llama-server does if nothing is set
TO_IT = f"to {PEER}"


class Load(NamedTuple):
    """A workload, and what is compared of its runs."""

    workload: str
    point: Point
    requests: int
    figure: str
    relation: Literal["<=", ">="]
    limit: float  # ours to the peer's
    shape: dict[str, int]  # what differs from the workload's own


SHORT = {"prompt_tokens": 32, "output_tokens": 32}
LONGER = {"prompt_tokens": 128, "output_tokens": 64}
CLIENTS, ARRIVALS = Point(clients=N_SLOTS), Point(rate=1.0)
SPEED, GAP = "output_throughput", "max_itl_ms"
LOADS = {
    "short requests": Load("offline", CLIENTS, 128, SPEED, ">=", 2.0, SHORT),
    "longer requests": Load("offline", CLIENTS, 32, SPEED, ">=", 1.5, LONGER),
    "shared prefix": Load("shared-prefix", CLIENTS, 32, SPEED, ">=", 5.0, {}),
    "long prompts": Load("interference", ARRIVALS, 48, GAP, "<=", 0.2, {}),
}
SHOWN = (SPEED, "median_ttft_ms", "p99_ttft_ms", GAP)


def openers(options: Namespace) -> dict[str, Opener]:
    """Ours, and llama-server unless it is not wanted."""
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_CTX, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
    )
    openers_by_name = {OURS: served_opener(options.model, config)}
    if not options.no_peers:
        sizes: dict[str, Any] = {"n_slots": N_SLOTS, "n_ctx": N_CTX}
        sizes |= {"threads": options.threads, "protocol": "openai"}
        for name in options.settings:
            _, flags, env = SETTINGS[name]
            title = PEER if name == DEFAULT else f"{PEER}, {name}"
            openers_by_name[title] = peer_opener(
                PEER, options.model, **sizes, flags=flags, env=env
            )
    return openers_by_name


async def measure(options: Namespace, report: Report) -> None:
    """Each load in rounds of its own."""
    for name in options.loads:
        say(name)
        load = LOADS[name]
        sizes = {
            "requests": options.requests or load.requests,
            "rounds": options.rounds,
        }
        sized = Namespace(model=options.model, **sizes)
        runs = await results(
            load.workload, openers(options), load.point, sized, **load.shape
        )
        conclude(report, name, runs)


def conclude(report: Report, name: str, runs: Mapping[str, list[Result]]) -> None:
    """Medians of the rounds; the ratio is ours to the best setting of theirs, by round."""
    load = LOADS[name]
    values = {
        system: [run[load.figure] for run in runs_of_system]
        for system, runs_of_system in runs.items()
    }
    mine = values.pop(OURS)
    ratios = [median_ratio(mine, other) for other in values.values()]
    nearest = min if load.relation == ">=" else max
    ratio = nearest(ratios, default=None)
    for system, runs_of_system in runs.items():
        figures = {key: median(run[key] for run in runs_of_system) for key in SHOWN}
        report.add(work=f"{name}, {system}", **figures)
    report.details[name] = {
        system: [{key: run[key] for key in SHOWN} for run in runs_of_system]
        for system, runs_of_system in runs.items()
    }
    if ratio is not None:
        claim = f"{name}, {load.figure} {TO_IT}"
        report.claim(claim, ratio, load.relation, load.limit)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD"
    )
    settings = [name for name in SETTINGS if SETTINGS[name].program == OWN]
    parser.add_argument("--settings", nargs="+", choices=settings, default=[DEFAULT])
    parser.add_argument("--requests", type=int, help="of each load, instead of its own")
    return run_script("served", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
