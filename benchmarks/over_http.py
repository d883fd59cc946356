"""
What HTTP costs: our engine behind one uvicorn worker against our engine in process.

Batches of requests of 128 tokens in and 64 out over 8 slots, sent all at once, by the same
client. The server is benchmarks/completions_server.py in a process of its own, where its
engine and its HTTP share the machine with the client, as they do in process. Server and
client run on uvloop, and so does the engine in process.

What is to be seen is smaller than what a neighbour does to a run of ten seconds: on a
shared machine the speed jumps by a third every few seconds. So both are open at the same
time and take turns, a batch each; who waits has no requests. Compared are batches that
follow each other, and the claim is the median of all these pairs.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import anyio
from load.measure import Report, arguments, median_ratio, parse, percentile, say
from load.workloads import token_prompts
from peers import free_port, serving
from peers.raw_client import http_target

from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.lab.bench.call import Call, Target
from pyllama_raw.lab.bench.drive import Run, closed_loop
from pyllama_raw.lab.bench.rounds import Opened
from pyllama_raw.lab.bench.targets import open_engine

N_SLOTS, N_CTX, N_BATCH = 8, 4096, 2048
N_PROMPT, N_OUTPUT = 128, 64
IN_PROCESS, HTTP = "in process", "over HTTP"


@asynccontextmanager
async def served(model: Path, config: EngineConfig) -> AsyncIterator[Opened]:
    """Our engine as a server."""
    port = free_port()
    script = Path(__file__).with_name("completions_server.py")
    command = [sys.executable, str(script), "--model", str(model)]
    command += ["--port", str(port), "--config", config.model_dump_json()]
    server = serving(command, port)
    url = await anyio.to_thread.run_sync(server.__enter__)
    try:
        async with http_target(url, "openai") as target:
            yield Opened(target, url.pid)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.__exit__, None, None, None)


async def measure(options: Namespace, report: Report) -> None:
    """Every round opens both anew."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=N_CTX, n_threads=options.threads),
        scheduler=SchedulerConfig(
            n_slots=N_SLOTS, token_budget=N_BATCH, prefill_quantum=N_BATCH
        ),
    )
    rounds: list[dict[str, list[Run]]] = []
    for index in range(options.rounds):
        say(f"round {index + 1} of {options.rounds}")
        async with (
            open_engine(options.model, config) as ours,
            served(options.model, config) as server,
        ):
            targets = {IN_PROCESS: ours.target, HTTP: server.target}
            rounds.append(await take_turns(options, index, targets))
    conclude(report, rounds)


async def take_turns(
    options: Namespace, index: int, targets: dict[str, Target]
) -> dict[str, list[Run]]:
    """Batches by target; the first of each, which does not count, is left out."""
    found: dict[str, list[Run]] = {name: [] for name in targets}
    for turn in range(options.turns + 1):
        names = list(targets) if turn % 2 else list(targets)[::-1]
        seed = index * (options.turns + 1) + turn
        prompts = token_prompts(options.model, seed, [N_PROMPT] * options.requests)
        calls = [Call(prompt, N_OUTPUT) for prompt in prompts]
        for name in names:
            run = await closed_loop(targets[name], calls, len(calls))
            if turn:
                found[name].append(run.checked())
    return found


def conclude(report: Report, rounds: list[dict[str, list[Run]]]) -> None:
    """The ratio is over HTTP to in process, by turn."""
    for name in (IN_PROCESS, HTTP):
        runs = [run for found in rounds for run in found[name]]
        speeds = [run.n_output / run.wall_s for run in runs]
        itls = [gap for run in runs for r in run.records for gap in r.itl_s]
        report.add(
            system=name,
            output_tok_per_s=median(speeds),
            ttft_p50_s=median(run.ttft_s(50) for run in runs),
            itl_p50_ms=percentile(itls, 50) * 1e3,
            itl_p99_ms=percentile(itls, 99) * 1e3,
        )
        report.details[name] = speeds
    ratio = median_ratio(report.details[HTTP], report.details[IN_PROCESS])
    report.claim("output_tok_per_s, HTTP to in process", ratio, ">=", 0.98)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=8, help="in a batch")
    parser.add_argument("--turns", type=int, default=12, help="of each, in a round")
    options = parse(parser)
    report = Report("over_http", options)
    anyio.run(measure, options, report, backend_options={"use_uvloop": True})
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
