"""
What HTTP costs: our engine behind one uvicorn worker against our engine in process.

Requests of 128 tokens in and 64 out over 8 slots, all sent at once, by the same client.
The server is benchmarks/completions_server.py in a process of its own, where its engine
and its HTTP share the machine with the client, as they do in process. Server and client
run on uvloop, and so does the engine in process.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median

import anyio
from load.measure import Report, arguments, median_ratio, parse
from load.rounds import results
from peers import free_port, serving

from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.bench.result import Result
from pyllama_raw.bench.rounds import Opened, Opener, Point
from pyllama_raw.bench.targets import open_engine, open_server

N_SLOTS, N_CTX, N_BATCH = 8, 4096, 2048
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
        async with open_server(url, "openai", url.pid) as opened:
            yield opened
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.__exit__, None, None, None)


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds; each opening begins with calls that do not count."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=N_CTX, n_threads=options.threads),
        scheduler=SchedulerConfig(
            n_slots=N_SLOTS, token_budget=N_BATCH, prefill_quantum=N_BATCH
        ),
    )
    openers: dict[str, Opener] = {
        IN_PROCESS: partial(open_engine, options.model, config),
        HTTP: partial(served, options.model, config),
    }
    point = Point(clients=options.requests)
    conclude(report, await results("offline", openers, point, options))


def conclude(report: Report, runs: dict[str, list[Result]]) -> None:
    """The ratio is over HTTP to in process, by round."""
    for name, found in runs.items():
        speeds = [result["output_throughput"] for result in found]
        report.add(
            system=name,
            output_tok_per_s=median(speeds),
            ttft_p50_s=median(r["median_ttft_ms"] for r in found) / 1e3,
            itl_p50_ms=median(r["median_itl_ms"] for r in found),
            itl_p99_ms=median(r["p99_itl_ms"] for r in found),
        )
        report.details[name] = speeds
    ratio = median_ratio(report.details[HTTP], report.details[IN_PROCESS])
    report.claim("output_tok_per_s, HTTP to in process", ratio, ">=", 0.98)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=32)
    options = parse(parser)
    report = Report("over_http", options)
    anyio.run(measure, options, report, backend_options={"use_uvloop": True})
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
