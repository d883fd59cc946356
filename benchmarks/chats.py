"""
Chats that come back: 24 chats of 3 turns in random order, 8 at a time, 8,192 cells.

A chat begins with 300 words; each later turn adds 40. 24 tokens out a turn. More chats
than slots: what was computed for a chat has to be kept elsewhere until its next turn.
Both keep snapshots in host memory, and are measured with the same limits of it, and with
steps of the same size.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from statistics import median
from time import perf_counter

import anyio
from load.client import Call, Record, Run, Target, ask, engine_target
from load.measure import Report, arguments, median_ratio, parse, say
from load.workloads import Chat, generator, turns
from peers.llama_server import llama_server
from peers.raw_client import http_target

N_CLIENTS, N_SLOTS, N_CTX, N_OUTPUT = 8, 8, 8192, 24
N_BATCH = 2048
OURS, PEER = "ours", "llama-server"
UNLIMITED = 2**40  # bytes


async def workload(target: Target, seed: int, n_chats: int, n_turns: int) -> Run:
    """All turns; a turn waits for the one before it in its chat."""
    rng = generator(seed)
    chats = [Chat(rng, n_turns) for _ in range(n_chats)]
    locks = [anyio.Lock() for _ in chats]
    waiting = iter(turns(rng, n_chats, n_turns))
    records: list[Record] = []

    async def client() -> None:
        for index in waiting:
            async with locks[index]:
                chat = chats[index]
                record = await ask(target, Call(chat.ask(), N_OUTPUT))
                chat.hear(record.text)
                records.append(record)

    started = perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(N_CLIENTS):
            group.start_soon(client)
    return Run(records, perf_counter() - started)


async def measure(options: Namespace, report: Report, urls: dict[str, str]) -> None:
    """Interleaved rounds of all systems, each with new chats."""
    runs: dict[str, list[Run]] = {}
    targets: dict[str, Callable[[], AbstractAsyncContextManager[Target]]] = {}
    for mib in options.cache_ram:
        targets[_name(OURS, mib)] = partial(
            engine_target,
            options,
            n_slots=N_SLOTS,
            n_ctx=N_CTX,
            cache_bytes=UNLIMITED if mib < 0 else mib * 2**20,
            token_budget=N_BATCH,
            prefill_quantum=N_BATCH,
        )
        if _name(PEER, mib) in urls:
            targets[_name(PEER, mib)] = partial(http_target, urls[_name(PEER, mib)])
    for index in range(options.rounds):
        for name, open_target in targets.items():
            say(f"round {index + 1} of {options.rounds}: {name}")
            async with open_target() as target:
                await ask(target, Call("warm up", N_OUTPUT))
                run = await workload(target, index, options.chats, options.turns)
            runs.setdefault(name, []).append(run)
    conclude(report, runs)


def conclude(report: Report, runs: dict[str, list[Run]]) -> None:
    """The ratio is their time to ours with the same limit."""
    for name, theirs in runs.items():
        wall_s = [run.wall_s for run in runs[name.replace(PEER, OURS)]]
        their_wall_s = [run.wall_s for run in theirs]
        if name in LIMITS:
            ratio = median_ratio(wall_s, their_wall_s)
            report.claim(f"time to {name}", ratio, "<=", LIMITS[name])
        report.add(
            system=name,
            wall_s=median(their_wall_s),
            it_to_ours=median_ratio(their_wall_s, wall_s),
            ttft_p50_s=median(run.ttft_s(50) for run in theirs),
            cached_tokens=median(run.n_cached for run in theirs),
        )
        report.details[name] = {"wall_s": their_wall_s}


# Our time to theirs, at most.
LIMITS = {
    f"{PEER}, no limit": 0.97,
    f"{PEER}, 128 MiB": 0.62,
    f"{PEER}, 48 MiB": 0.50,
}


def _name(system: str, mib: int) -> str:
    return f"{system}, {'no limit' if mib < 0 else f'{mib} MiB'}"


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--cache-ram",
        type=int,
        nargs="+",
        default=[-1, 128, 48],
        help="MiB; -1: no limit",
    )
    options = parse(parser)
    report = Report("chats", options)
    with ExitStack() as stack:
        urls = {}
        for mib in () if options.no_peers else options.cache_ram:
            server = llama_server(
                options.model,
                n_slots=N_SLOTS,
                n_ctx=N_CTX,
                threads=options.threads,
                flags=("--cache-ram", str(mib)),
            )
            urls[_name(PEER, mib)] = stack.enter_context(server)
        anyio.run(measure, options, report, urls)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
