"""
How well the simulator predicts two live replicas: throughput and times to the first token.

The same chats come at the same times to two replicas on Ray and to two simulated machines,
under the same rule. The cost model is fitted to the steps of two replicas there, under other
chats that come as fast, because Ray computes on the same CPUs. What HTTP and Ray add to a first
token is measured while nothing else runs, and is added to the prediction. Needs
`pip install 'ray[serve]'`, and a CPU for each replica.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from json import loads
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import anyio
import httpx
from load.measure import NO_DRAFTS, Report, arguments, percentile, run_script, say
from peers.on_ray import end, ray_cluster, run
from scaling import BLOCK, chats

from pyllama_raw import ContextConfig, EngineConfig, LogConfig, SchedulerConfig
from pyllama_raw.engine.logs import read_records
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.lab.arrivals import Arrival
from pyllama_raw.lab.sim import (
    CostModel,
    Machine,
    RouterName,
    Trace,
    fit,
    simulate,
    until_next,
)
from pyllama_raw.serve.deployment import Deployment

N_SLOTS, N_CTX_SLOT, THINK_S = 8, 2048, 4.0
N_IDLE, IDLE_BLOCKS, IDLE_FIRST = 20, 4, 10**6  # requests of their own, one by one
NAMES = ("tok/s", "ttft p50", "ttft p99", "cached %")
FIRST_ID, N_IDS = 100, 150  # tokens that prompts are made of: every vocabulary has them


class Played(NamedTuple):
    """One request of a live run, in seconds since the start."""

    first_s: float
    end_s: float
    n_prompt: int
    n_cached: int
    n_output: int


@cache
def block(number: int) -> list[int]:
    """The tokens of a block."""
    rng = Random(number)  # noqa: S311 - it is to be repeated
    return [FIRST_ID + rng.randrange(N_IDS) for _ in range(BLOCK)]


async def play(urls: Sequence[str], trace: Trace) -> dict[str, float]:
    """Figures of *trace* on live services, which take turns, each request at its time."""
    played: list[Played] = []
    async with (
        httpx.AsyncClient(timeout=600) as http,
        anyio.create_task_group() as group,
    ):
        started = perf_counter()
        for arrival, url in zip(trace.arrivals, cycle(urls), strict=False):
            await anyio.sleep(max(started + arrival.at_s - perf_counter(), 0))
            group.start_soon(partial(_ask, http, url, arrival, started, played))
    n_prompt = sum(call.n_prompt for call in played)
    ttft_s = [call.first_s for call in played]
    n_output = sum(call.n_output for call in played)
    return {
        "tok/s": n_output / max(call.end_s for call in played),
        "ttft p50": median(ttft_s),
        "ttft p99": percentile(ttft_s, 99),
        "cached %": 100 * sum(call.n_cached for call in played) / n_prompt,
    }


async def transport_s(url: str, cost: CostModel) -> float:
    """Seconds that a first token takes beyond the step that makes it, on idle replicas."""
    played: list[Played] = []
    async with httpx.AsyncClient(timeout=600) as http:
        for index in range(N_IDLE):
            first = IDLE_FIRST + index * IDLE_BLOCKS
            blocks = tuple(range(first, first + IDLE_BLOCKS))
            n_tokens = IDLE_BLOCKS * BLOCK
            arrival = Arrival(0.0, n_tokens, 1, blocks, block=BLOCK)
            await _ask(http, url, arrival, perf_counter(), played)
    n_cells = n_tokens * (n_tokens + 1) // 2
    step_s = cost.seconds((n_tokens, 0, n_cells, 0, 0))
    return max(median(call.first_s for call in played) - step_s, 0.0)


async def _ask(
    http: httpx.AsyncClient,
    url: str,
    arrival: Arrival,
    started: float,
    played: list[Played],
) -> None:
    prompt = [token for number in arrival.blocks for token in block(number)]
    body = {"prompt": prompt, "max_tokens": arrival.n_output, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    came, first_s, usage = perf_counter(), 0.0, None
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or perf_counter() - came
                if '"choices":[]' in line:  # others may have separators of lines
                    usage = loads(line[6:])["usage"]
    assert usage, "the last event has the usage"
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = usage["prompt_tokens"], n_cached, usage["completion_tokens"]
    played.append(Played(first_s, perf_counter() - started, *counts))


def served(options: Namespace, config: EngineConfig) -> Deployment:
    """The model with *config*."""
    return Deployment(models={"m": str(options.model)}, configs={"m": config})


def cost_of(options: Namespace, config: EngineConfig, url: str) -> CostModel:
    """Fitted to the steps of two replicas that share the load."""
    with TemporaryDirectory() as folder:
        files = {f"/{name}": Path(folder) / f"{name}.jsonl" for name in "ab"}
        for prefix, file in files.items():
            logged = config.model_copy(update={"log": LogConfig(step_log=file)})
            run(served(options, logged), prefix)
        urls = [url + prefix for prefix in files]
        anyio.run(play, urls, chats(options.chats, options.rate, 1, THINK_S))
        for prefix in files:
            end(prefix)
        logs = [until_next(read_records(file, StepRecord)) for file in files.values()]
        result = fit([step for log in logs for step in log])
    say(
        f"{result.n_steps} steps, R2 {result.r2:.3f}, of the total {result.total_error:.1%}"
    )
    return result.cost


def measure(options: Namespace, report: Report) -> None:
    """Rounds of a live run and its prediction."""
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_SLOTS * N_CTX_SLOT, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
    )
    machine = Machine(n_slots=N_SLOTS, n_ctx_slot=N_CTX_SLOT, cached_tokens=2**20)
    ratios: dict[str, list[float]] = {name: [] for name in NAMES}
    with ray_cluster() as url:
        for index in range(options.rounds):
            machine = replace(machine, cost=cost_of(options, config, url))
            trace = chats(options.chats, options.rate, 2 + index, THINK_S)
            run(served(options, config), n_replicas=2)
            added_s = anyio.run(transport_s, url, machine.cost)
            live = anyio.run(play, [url], trace)
            end("/")
            rule: RouterName = "prefix_affinity"
            row = simulate(trace, machine, n_replicas=2, router=rule).row()
            row |= {name: row[name] + added_s for name in NAMES[1:3]}
            for name in NAMES:
                ratios[name].append(row[name] / live[name])
            report.add(round=index, of="live", **live, added_ms=1e3 * added_s)
            report.add(round=index, of="predicted", **{n: row[n] for n in NAMES})
    for name in NAMES[:3]:
        off = abs(median(ratios[name]) - 1)
        report.claim(f"{name}: predicted is off by", off, "<=", 0.1)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--chats", type=int, default=60, help="of 4 turns (60)")
    parser.add_argument("--rate", type=float, default=2.0, help="turns a second (2.0)")
    parser.set_defaults(threads=1)  # of each engine
    # Processes of Ray look like those of others, so nobody can tell whether there were others.
    return run_script("ray_predicted", measure, parser, timed=False)


if __name__ == "__main__":
    sys.exit(main())
