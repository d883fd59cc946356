"""
Reloads and sleeps under load: no request fails, and memory comes back.

Requests come at a fixed rate while the model is replaced again and again by a copy of its file, so
that weights are not shared. Memory of the old one has to be gone a second after its last request.
Then the engine sleeps and wakes; a chat goes on after each, with equal tokens.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from pathlib import Path
from time import perf_counter

import anyio
import anyio.to_thread
from load.client import fixed_length, open_engine
from load.machine import settled_rss_bytes
from load.measure import Report, arguments, percentile, run_script

from pyllama_raw import AsyncEngine, PyllamaError

N_SLOTS, N_CTX, N_TOKENS = 8, 4096, 2
PROMPT = [1, 2, 3, 4]
SETTLE_S = 1.0  # memory is to be gone so long after the last request
CHAT = "Once upon a time there was a llama. " * 8


class Load:
    """Requests at a fixed rate, and when the last one of each session has ended."""

    def __init__(self, engine: AsyncEngine, rate: float) -> None:
        self.engine, self.rate = engine, rate
        self.ends = Counter[str]()  # by how they ended
        self.seconds: list[float] = []
        self.last_end: dict[object, float] = {}  # by session
        self.stops = anyio.Event()

    async def run(self) -> None:
        """Send requests until it is told to stop; returns when all have ended."""
        started, n_sent = perf_counter(), 0
        async with anyio.create_task_group() as group:
            while not self.stops.is_set():
                group.start_soon(self._ask)
                n_sent += 1
                wait_s = started + n_sent / self.rate - perf_counter()
                await anyio.sleep(max(wait_s, 0.0))

    async def _ask(self) -> None:
        session, began = self.engine._sessions.current, perf_counter()
        try:
            result = await self.engine.complete(PROMPT, fixed_length(N_TOKENS))
            end = str(result.finish_reason)
        except PyllamaError as error:
            end = type(error).__name__
        self.ends[end] += 1
        self.last_end[session] = perf_counter()
        self.seconds.append(perf_counter() - began)


async def measure(options: Namespace, report: Report) -> None:
    """All with one engine."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.gguf"
        shutil.copy(options.model, copy)
        async with open_engine(options, n_slots=N_SLOTS, n_ctx=N_CTX) as engine:
            await _reloads(engine, options, copy, report)
            await _sleeps(engine, options, report)


async def _reloads(
    engine: AsyncEngine, options: Namespace, copy: Path, report: Report
) -> None:
    load, late_s, reload_s, rss = Load(engine, options.rate), [], [], []
    await engine.complete(PROMPT, fixed_length(N_TOKENS))
    async with anyio.create_task_group() as group:
        group.start_soon(load.run)
        for i in range(options.reloads):
            await anyio.sleep(SETTLE_S)
            old = engine._sessions.current
            began = perf_counter()
            await engine.reload(copy if i % 2 == 0 else options.model)
            reload_s.append(perf_counter() - began)
            await anyio.to_thread.run_sync(old.thread.gone.result)
            gone_at = perf_counter()
            late_s.append(gone_at - load.last_end[old])
            await anyio.sleep(SETTLE_S)
            rss.append(settled_rss_bytes())
        load.stops.set()
    n_done = load.ends["length"]
    report.add(
        what="reload",
        times=options.reloads,
        requests=sum(load.ends.values()),
        failed=sum(load.ends.values()) - n_done,
        p50_ms=percentile(load.seconds, 50) * 1e3,
        p99_ms=percentile(load.seconds, 99) * 1e3,
        seconds=percentile(reload_s, 50),
        rss_first_mib=rss[0] / 2**20,
        rss_last_mib=rss[-1] / 2**20,
    )
    report.details |= {"ends": dict(load.ends), "rss_bytes": rss, "reload_s": reload_s}
    report.claim("requests that failed", sum(load.ends.values()) - n_done, "<=", 0)
    report.claim("seconds from the last request to the end", max(late_s), "<=", 1.0)
    report.claim(
        "memory after the last to after the first", rss[-1] / rss[0], "<=", 1.1
    )


async def _sleeps(engine: AsyncEngine, options: Namespace, report: Report) -> None:
    params = fixed_length(8)
    first = await engine.complete(CHAT, params)
    turn = CHAT + first.text
    await engine.complete(turn, params)
    for level in (1, 2):
        rss_awake, rss_asleep, outputs, wake_s = [], [], set(), []
        for _ in range(options.sleeps):
            await engine.sleep(level)
            rss_asleep.append(settled_rss_bytes())
            began = perf_counter()
            await engine.wake()
            wake_s.append(perf_counter() - began)
            result = await engine.complete(turn, params)
            outputs.add((result.token_ids, result.usage.cached_tokens))
            rss_awake.append(settled_rss_bytes())
        settled = options.sleeps // 5
        report.add(
            what=f"sleep {level}",
            times=options.sleeps,
            seconds=percentile(wake_s, 50),
            rss_first_mib=rss_awake[settled] / 2**20,
            rss_last_mib=rss_awake[-1] / 2**20,
            rss_asleep_mib=percentile(rss_asleep, 50) / 2**20,
        )
        name = f"sleep {level}"
        report.claim(f"{name}: different next turns", len(outputs), "<=", 1)
        growth = rss_awake[-1] / rss_awake[settled]
        report.claim(f"{name}: memory at the end to settled", growth, "<=", 1.02)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--reloads", type=int, default=6)
    parser.add_argument("--sleeps", type=int, default=50, help="of each level")
    return run_script("reload", measure, parser, timed=False)


if __name__ == "__main__":
    sys.exit(main())
