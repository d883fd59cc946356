"""
From the start of a process to its first token, against llama-server.

Ours: start Python, import, open the engine, stream. llama-server: start, wait until
/health says that it is ready (asked every 5 ms), stream. Both get the same 16 tokens,
8 slots and 4,096 cells. The model file is in the page cache, and our bytecode on disk as
after an installation: a first round, which brings them there, does not count.
llama-server runs the model once, empty, before it is ready; --no-warmup leaves that out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from argparse import Namespace
from statistics import median
from time import perf_counter

from load.measure import Report, arguments, median_ratio, parse, say
from load.workloads import token_prompts
from peers.llama_server import llama_server

N_SLOTS, N_CTX, N_PROMPT = 8, 4096, 16
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

imported = time.perf_counter()
model, prompt, options = json.loads(sys.argv[1])
config = EngineConfig(
    context=ContextConfig(n_ctx=options["n_ctx"], n_threads=options["threads"]),
    scheduler=SchedulerConfig(n_slots=options["n_slots"]),
)


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


def ours(options: Namespace, prompt: list[int]) -> tuple[float, list[float]]:
    """Seconds until the first token, and of import, open and first step."""
    sizes = {"n_slots": N_SLOTS, "n_ctx": N_CTX, "threads": options.threads}
    given = json.dumps([str(options.model), prompt, sizes])
    started = perf_counter()
    command = [sys.executable, "-c", OURS_CODE, given]
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


def theirs(options: Namespace, prompt: list[int], *flags: str) -> float:
    """Seconds until llama-server's first token."""
    body = {"prompt": prompt, "n_predict": 2, "temperature": 0, "stream": True}
    sizes = {"n_slots": N_SLOTS, "n_ctx": N_CTX, "threads": options.threads}
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


def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds."""
    walls: dict[str, list[float]] = {}
    parts: list[list[float]] = []
    for index in range(-1, options.rounds):
        say(f"round {index + 1} of {options.rounds}")
        (prompt,) = token_prompts(options.model, index, [N_PROMPT])
        own_s, own_parts = ours(options, prompt)
        found = {OURS: own_s}
        if not options.no_peers:
            found[PEER] = theirs(options, prompt)
            found[PEER_COLD] = theirs(options, prompt, "--no-warmup")
        if index >= 0:
            parts.append(own_parts)
            for name, wall_s in found.items():
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
    options = parse(arguments(__doc__))
    report = Report("start_up", options)
    measure(options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
