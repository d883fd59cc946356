"""
From the start of a process to its first token, against llama-server.

Ours: start Python, import, open the engine, stream. llama-server: start, wait until
/health says that it is ready (asked every 5 ms), stream. Both get the same 16 tokens,
slots, cells and threads, by default those of our engine. llama-server writes to all cells
before it is ready, so with fewer of them (--n-ctx) it is ready sooner.

The model file is in the page cache, and our bytecode on disk as after an installation: a
first round, which brings them there, does not count. Python is that of a venv that has
what this one has but for its start-up files, those of an editable installation and of
tools for tests. llama-server runs the model once, empty, before it is ready; --no-warmup
leaves that out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import venv
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

from load.measure import Report, arguments, median_ratio, parse, say
from load.workloads import token_prompts
from peers.llama_server import llama_server

import pyllama_raw

N_SLOTS, N_CTX, N_PROMPT = 8, 16384, 16  # slots and cells as ours has by default
POLL_S = 0.005
# A checkout has no bytecode where this is set; each start would compile all sources.
KEEPS_BYTECODE = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
OURS, PEER, PEER_COLD = "ours", "llama-server", "llama-server --no-warmup"
OURS_CODE = """
import json, sys, time

started = time.perf_counter()
import anyio
from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)

model, prompt, sizes = json.loads(sys.argv[1])
config = EngineConfig(
    context=ContextConfig(n_ctx=sizes["n_ctx"], n_threads=sizes["threads"]),
    scheduler=SchedulerConfig(n_slots=sizes["n_slots"]),
)
imported = time.perf_counter()


async def main():
    async with AsyncEngine.open(model, config) as engine:
        opened = time.perf_counter()
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        async with engine.generate(prompt, params) as generation:
            await anext(generation)
            done = time.perf_counter()
            print(imported - started, opened - imported, done - opened, flush=True)


anyio.run(main)
"""


@contextmanager
def installed_python() -> Iterator[Path]:
    """A Python that finds what this one does, and runs no other start-up file."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        packages = sysconfig.get_path("purelib", vars={"base": folder})
        folders = (Path(pyllama_raw.__file__).parents[1], sysconfig.get_path("purelib"))
        lines = "\n".join(map(str, folders))
        Path(packages, "installed.pth").write_text(lines + "\n")
        yield Path(folder, "bin", "python")


def ours(
    python: Path, options: Namespace, prompt: list[int], sizes: dict[str, int]
) -> tuple[float, list[float]]:
    """Seconds until the first token, and of import, open and first step."""
    arguments = json.dumps([str(options.model), prompt, sizes])
    started = perf_counter()
    command = [str(python), "-c", OURS_CODE, arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=KEEPS_BYTECODE
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        wall_s = perf_counter() - started
        process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"our process ended with status {process.returncode}")
    return wall_s, [float(part) for part in line.split()]


def theirs(
    options: Namespace, prompt: list[int], sizes: dict[str, int], *flags: str
) -> float:
    """Seconds until llama-server's first token."""
    body = {"prompt": prompt, "n_predict": 2, "temperature": 0, "stream": True}
    started = perf_counter()
    with llama_server(options.model, **sizes, flags=flags, poll_s=POLL_S) as url:
        request = urllib.request.Request(  # noqa: S310
            f"{url}/completion",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            while not answer.readline().startswith(b"data: {"):
                pass
            return perf_counter() - started


def measure(options: Namespace, report: Report, python: Path) -> None:
    """Interleaved rounds."""
    sizes = {"n_slots": N_SLOTS, "n_ctx": options.n_ctx, "threads": options.threads}
    walls: dict[str, list[float]] = {}
    parts: list[list[float]] = []
    for index in range(-1, options.rounds):
        say(f"round {index + 1} of {options.rounds}")
        (prompt,) = token_prompts(options.model, index, [N_PROMPT])
        own_s, own_parts = ours(python, options, prompt, sizes)
        times = {OURS: own_s}
        if not options.no_peers:
            times[PEER] = theirs(options, prompt, sizes)
            times[PEER_COLD] = theirs(options, prompt, sizes, "--no-warmup")
        if index >= 0:
            parts.append(own_parts)
            for name, wall_s in times.items():
                walls.setdefault(name, []).append(wall_s)
    conclude(report, walls, parts)


def conclude(
    report: Report, walls: dict[str, list[float]], parts: list[list[float]]
) -> None:
    """Parts are of ours; what is missing to the whole is the start of Python."""
    names = ("import_s", "open_s", "first_token_s")
    medians = [median(column) for column in zip(*parts, strict=True)]
    for name, values in walls.items():
        row: dict[str, object] = {"until_first_token_s": median(values)}
        if name == OURS:
            row |= dict(zip(names, medians, strict=True))
        else:
            row["ours_to_it"] = median_ratio(walls[OURS], values)
        report.add(system=name, **row)
    report.details |= {"walls": walls, "parts": parts}
    if PEER in walls:
        ratio = median_ratio(walls[OURS], walls[PEER])
        report.claim(f"until_first_token_s to {PEER}", ratio, "<=", 1.15)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--n-ctx", type=int, default=N_CTX, help=f"cells ({N_CTX})")
    options = parse(parser)
    report = Report("start_up", options)
    with installed_python() as python:
        measure(options, report, python)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
