"""
Opening and closing an engine again and again leaves no memory and no thread behind.

Each cycle opens the model, completes one request and closes. A second process opens one,
leaves a request running, never closes, and has to end with status 0.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

import anyio
import psutil  # type: ignore[import-untyped]
from load.client import fixed_length, open_engine
from load.machine import settled_rss_bytes
from load.measure import Report, arguments, run_script

N_SLOTS, N_CTX = 2, 256
NEVER_CLOSES = """
import sys
from pathlib import Path

import anyio

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig, SamplingParams
from pyllama_raw.engine.opening import build


async def main():
    config = EngineConfig(context=ContextConfig(n_ctx=2048))
    engine = AsyncEngine(build(Path(sys.argv[1]), config))
    generation = engine.generate([1, 2, 3], SamplingParams(ignore_eos=True))
    await anext(generation)
    return engine, generation


kept = anyio.run(main)
"""


async def cycle(options: Namespace) -> None:
    """Open, complete, close."""
    async with open_engine(options, n_slots=N_SLOTS, n_ctx=N_CTX) as engine:
        await engine.complete([1, 2, 3], fixed_length(2))


def n_threads() -> int:
    """Threads of this process, those of libraries included."""
    return int(psutil.Process().num_threads())


def measure(options: Namespace, report: Report) -> None:
    """One event loop a cycle; the first cycles fill caches and thread pools."""
    settle = max(options.cycles // 5, 1)
    at_start = n_threads()
    rss: list[int] = []
    threads: list[int] = []
    for _ in range(options.cycles):
        anyio.run(cycle, options)
        rss.append(settled_rss_bytes())
        threads.append(n_threads())
    status = _never_closes(options)
    report.add(
        cycles=options.cycles,
        rss_first_mib=rss[0] / 2**20,
        rss_settled_mib=rss[settle - 1] / 2**20,
        rss_end_mib=rss[-1] / 2**20,
        threads_at_start=at_start,
        threads_after_first=threads[0],
        threads_at_end=threads[-1],
        status_never_closed=status,
    )
    report.details |= {"rss_bytes": rss, "threads": threads}
    report.claim("rss_end_to_settled", rss[-1] / rss[settle - 1], "<=", 1.02)
    # OpenMP keeps its workers for the next engine of the process: one set of them.
    n_left = at_start + options.threads - 1
    report.claim("threads_at_end", threads[-1], "<=", n_left)
    report.claim("status_never_closed", status, "<=", 0)


def _never_closes(options: Namespace) -> int:
    command = [sys.executable, "-c", NEVER_CLOSES, str(options.model)]
    return abs(subprocess.run(command, timeout=120, check=False).returncode)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--cycles", type=int, default=100)
    return run_script("open_close", measure, parser, timed=False)


if __name__ == "__main__":
    sys.exit(main())
