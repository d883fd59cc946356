"""
Tokens a second and the longest gap of streams beside programs that compute without end.

1 and 8 streams go on beside 0, 1, 2 and 4 busy loops of equal priority. Settings are compared by
`--spin`: `default` is what the package chooses, `libgomp` what libgomp chooses, a number is
GOMP_SPINCOUNT, and `passive` and `active` are OMP_WAIT_POLICY. Each setting has a process of its
own in each round, because libgomp reads its variables once, and who is first rotates. The ratio
is to the same setting without a loop, within the round; `share` is the part of its time in which
the thread that computes had a CPU. Claims are about the first setting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import nan
from statistics import median
from time import perf_counter

import anyio
from load.client import open_engine
from load.measure import Report, arguments, median_ratio, parse, say

from pyllama_raw import AsyncEngine, SamplingParams

N_CTX_SLOT = 4096
N_BEFORE = 4  # times that each stream goes on before a window
SETTLE_S = 0.3
LOOP = "import os\nwhile os.getppid() == {}:\n    for _ in range(10**6): pass"
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
LIBGOMP = "300000"
CLAIMED = {1: (0.30, 0.25, 0.15), 8: (0.35, 0.30, 0.20)}  # beside 1, 2 and 4 loops
BUSY = (1, 2, 4)
MAX_GAP_S = 0.2


@dataclass(frozen=True, slots=True)
class Window:
    """What streams did beside so many loops."""

    tok_per_s: float
    gap_s: float  # the longest of all streams
    share: float  # of decodes, with a CPU


Case = tuple[int, int]  # streams, loops


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """They end with the block, and with this process."""
    loops = [
        subprocess.Popen([sys.executable, "-c", LOOP.format(os.getpid())])
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


async def window(engine: AsyncEngine, streams: int, busy: int, wall_s: float) -> Window:
    """Let *streams* go on for *wall_s* beside *busy* loops."""
    marks_by_stream: list[list[tuple[float, int]]] = [[] for _ in range(streams)]
    all_ready = anyio.Event()
    params = SamplingParams(max_tokens=N_CTX_SLOT - 64, ignore_eos=True)

    async def read(number: int) -> None:
        prompt = f"{number} {busy} streams beside loops count on:"
        async with engine.generate(prompt, params) as stream:
            async for delta in stream:
                marks_by_stream[number].append((perf_counter(), len(delta.token_ids)))
                if min(map(len, marks_by_stream)) >= N_BEFORE:
                    all_ready.set()
        raise RuntimeError("a stream has ended within its window: lower --seconds")

    async with anyio.create_task_group() as group:
        for number in range(streams):
            group.start_soon(read, number)
        await all_ready.wait()
        with busy_loops(busy):
            await anyio.sleep(SETTLE_S)
            start, before = perf_counter(), engine.stats()
            await anyio.sleep(wall_s)
            end, after = perf_counter(), engine.stats()
        group.cancel_scope.cancel()
    within = [
        [mark for mark in marks if start < mark[0] <= end] for marks in marks_by_stream
    ]
    times = [[start, *(at for at, _ in marks), end] for marks in within]
    gap_s = max(later - at for marks in times for at, later in pairwise(marks))
    n_tokens = sum(n for marks in within for _, n in marks)
    decode_s = max(after.decode_s - before.decode_s, 1e-9)
    share = (after.decode_cpu_s - before.decode_cpu_s) / decode_s
    return Window(n_tokens / (end - start), gap_s, share)


async def measure_here(options: Namespace) -> list[tuple[Case, Window]]:
    """All cases in this process, with the variables that it was started with."""
    windows = []
    for streams in options.streams:
        n_ctx = streams * N_CTX_SLOT
        async with open_engine(options, n_slots=streams, n_ctx=n_ctx) as engine:
            await window(engine, streams, 0, 0.5)
            for busy in options.busy:
                window_of_case = await window(engine, streams, busy, options.seconds)
                windows.append(((streams, busy), window_of_case))
    return windows


def environment(setting: str) -> dict[str, str]:
    """The variables of this process, but for those of libgomp."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if setting in ("passive", "active"):
        return env | {"OMP_WAIT_POLICY": setting}
    if setting == "default":
        return env
    return env | {"GOMP_SPINCOUNT": LIBGOMP if setting == "libgomp" else setting}


def measure_setting(options: Namespace, setting: str) -> dict[Case, Window]:
    """All cases in a process of its own."""
    command = [sys.executable, __file__, "--here", "--model", str(options.model)]
    command += ["--threads", str(options.threads), "--seconds", str(options.seconds)]
    command += ["--streams", *map(str, options.streams)]
    command += ["--busy", *map(str, options.busy)]
    done = subprocess.run(
        command, env=environment(setting), stdout=subprocess.PIPE, check=True
    )
    return {
        (case[0], case[1]): Window(**fields) for case, fields in json.loads(done.stdout)
    }


def measure(options: Namespace, report: Report) -> None:
    """Rounds of all settings."""
    settings = list(dict.fromkeys(options.spin))
    runs: dict[str, list[dict[Case, Window]]] = {setting: [] for setting in settings}
    for index in range(options.rounds):
        first = index % len(settings)
        for setting in settings[first:] + settings[:first]:
            say(f"round {index + 1} of {options.rounds}: {setting}")
            runs[setting].append(measure_setting(options, setting))
    report.details |= {
        setting: [
            [(case, asdict(window_of_case)) for case, window_of_case in run.items()]
            for run in done
        ]
        for setting, done in runs.items()
    }
    conclude(report, runs)


def conclude(report: Report, runs: Mapping[str, list[dict[Case, Window]]]) -> None:
    """Rows of all cases, and what is claimed of the first setting."""
    first = next(iter(runs))
    for case in runs[first][0]:
        streams, busy = case
        for setting, done in runs.items():
            speeds = _speeds(done, case)
            to_quiet = median_ratio(speeds, _speeds(done, (streams, 0)))
            to_other = median_ratio(_speeds(runs[first], case), speeds)
            gap_s = max(run[case].gap_s for run in done)
            shares = [run[case].share for run in done]
            report.add(
                streams=streams,
                busy=busy,
                spin=setting,
                tok_per_s=median(speeds),
                to_quiet=to_quiet,
                first_to_it=to_other,
                gap_s=gap_s,
                share=median(shares),
            )
            if setting == first and busy in BUSY and streams in CLAIMED:
                name = f"{streams} streams beside {busy} loops"
                limit = CLAIMED[streams][BUSY.index(busy)]
                report.claim(f"{name}, to quiet", to_quiet, ">=", limit)
                report.claim(f"{name}, longest gap in s", gap_s, "<=", MAX_GAP_S)
            if setting == "libgomp" != first and not busy:
                report.claim(f"{streams} alone, to libgomp's", to_other, ">=", 0.98)


def _speeds(done: list[dict[Case, Window]], case: Case) -> list[float]:
    """By round; a window without a token still has a speed that can be divided by."""
    return [max(run[case].tok_per_s, 0.01) if case in run else nan for run in done]


def main() -> int:
    """Run the script, or one setting of it."""
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, *BUSY])
    parser.add_argument("--spin", nargs="+", default=["default"], metavar="SETTING")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case (3)")
    parser.add_argument("--here", action="store_true", help="one setting; prints JSON")
    options = parse(parser)
    if options.here:
        windows = anyio.run(measure_here, options)
        print(
            json.dumps(
                [(case, asdict(window_of_case)) for case, window_of_case in windows]
            )
        )
        return 0
    report = Report("neighbour", options)
    measure(options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
