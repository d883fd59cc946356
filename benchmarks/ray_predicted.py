"""
How well the simulator predicts two live replicas: throughput and times to the first token.

The same chats come at the same times to two replicas on Ray and to two simulated machines,
under the same rule. The cost model is fitted to the steps of one server that gets half of
the load. Needs `pip install 'ray[serve]'`, and a CPU for each replica.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import anyio
import httpx
from load.measure import Report, arguments, percentile, run_script, say
from peers.on_ray import ray_cluster, run
from peers.ours import pyllama_raw_server
from scaling import BLOCK, chats

from pyllama_raw import ContextConfig, EngineConfig, LogConfig, SchedulerConfig
from pyllama_raw.engine.records import read_records
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.lab.bench.trace_formats import Arrival
from pyllama_raw.lab.sim import CostModel, Machine, Trace, fit, simulate, until_next
from pyllama_raw.serve.deployment import Deployment

N_SLOTS, N_CTX_SLOT, THINK_S = 8, 2048, 4.0
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


async def play(url: str, trace: Trace) -> dict[str, float]:
    """Figures of *trace* on a live service, each request at its time."""
    played: list[Played] = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=600) as http,
        anyio.create_task_group() as group,
    ):
        started = perf_counter()
        for arrival in trace.arrivals:
            await anyio.sleep(max(started + arrival.at_s - perf_counter(), 0))
            group.start_soon(partial(_ask, http, arrival, started, played))
    first = trace.arrivals[0].at_s
    n_prompt = sum(each.n_prompt for each in played)
    ttft_s = [each.first_s for each in played]
    n_output = sum(each.n_output for each in played)
    return {
        "tok/s": n_output / (max(each.end_s for each in played) - first),
        "ttft p50": median(ttft_s),
        "ttft p99": percentile(ttft_s, 99),
        "cached %": 100 * sum(each.n_cached for each in played) / n_prompt,
    }


async def _ask(
    http: httpx.AsyncClient, arrival: Arrival, started: float, played: list[Played]
) -> None:
    prompt = [token for number in arrival.blocks for token in block(number)]
    body = {"prompt": prompt, "max_tokens": arrival.n_output, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    came, first_s, usage = perf_counter(), 0.0, {}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or perf_counter() - came
                usage = httpx.Response(200, content=line[6:]).json().get("usage")
    assert usage, "the last event has the usage"
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = usage["prompt_tokens"], n_cached, usage["completion_tokens"]
    played.append(Played(first_s, perf_counter() - started, *counts))


def cost_of(options: Namespace, config: EngineConfig) -> CostModel:
    """Fitted to the steps of one server under half of the load."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "steps.jsonl"
        logged = config.model_copy(update={"log": LogConfig(step_log=file)})
        with pyllama_raw_server(options.model, logged) as url:
            half = chats(options.chats // 2, options.rate / 2, 1, THINK_S)
            anyio.run(play, url, half)
        found = fit(until_next(read_records(file, StepRecord)))
    say(
        f"{found.n_steps} steps, R2 {found.r2:.3f}, of the total {found.total_error:.1%}"
    )
    return found.cost


def measure(options: Namespace, report: Report) -> None:
    """Rounds of a live run and its prediction."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=N_SLOTS * N_CTX_SLOT, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
    )
    deployment = Deployment(models={"m": str(options.model)}, configs={"m": config})
    machine = Machine(n_slots=N_SLOTS, n_ctx_slot=N_CTX_SLOT, cached_tokens=2**20)
    ratios: dict[str, list[float]] = {name: [] for name in NAMES}
    with ray_cluster() as url:
        for index in range(options.rounds):
            machine = replace(machine, cost=cost_of(options, config))
            trace = chats(options.chats, options.rate, 2 + index, THINK_S)
            run(deployment, n_replicas=2)
            live = anyio.run(play, url, trace)
            found = simulate(
                trace, machine, n_replicas=2, router="prefix_affinity"
            ).row()
            for name in NAMES:
                ratios[name].append(found[name] / live[name])
            report.add(round=index, of="live", **live)
            report.add(round=index, of="predicted", **{n: found[n] for n in NAMES})
    for name in NAMES[:3]:
        off = abs(median(ratios[name]) - 1)
        report.claim(f"{name}: predicted is off by", off, "<=", 0.1)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--chats", type=int, default=60, help="of 4 turns (60)")
    parser.add_argument("--rate", type=float, default=2.0, help="turns a second (2.0)")
    parser.set_defaults(threads=1)  # of each engine
    return run_script("ray_predicted", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
