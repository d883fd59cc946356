"""
How soon the slot of a client that left serves the next one.

One slot. A client sends a prompt of 1,200 words and leaves 0.5 s into its prefill; TTFT
is that of the short request sent right after.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import AsyncExitStack
from statistics import median

import anyio
from load.client import Call, EngineTarget, Target, ask, open_engine
from load.measure import Report, arguments, percentile, run_script, say
from load.workloads import texts
from peers.llama_server import optional_server
from peers.raw_client import http_target

N_SLOTS, N_CTX = 1, 2048
LEAVE_S = 0.5


async def next_ttft_s(target: Target, seed: int) -> float:
    """TTFT of the request that follows one whose client left."""
    (long,) = texts(seed, 1, 1200)
    (short,) = texts(seed + 1000, 1, 8)
    with anyio.move_on_after(LEAVE_S) as scope:
        await ask(target, Call(long, 8))
    if not scope.cancelled_caught:
        raise RuntimeError(f"the long request ended within {LEAVE_S} s: nobody left")
    return (await ask(target, Call(short, 8))).ttft_s


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds, after one that does not count."""
    async with AsyncExitStack() as stack:
        server = optional_server(options, n_slots=N_SLOTS, n_ctx=N_CTX)
        url = stack.enter_context(server)
        opening = open_engine(options, n_slots=N_SLOTS, n_ctx=N_CTX)
        engine = await stack.enter_async_context(opening)
        targets: dict[str, Target] = {"ours": EngineTarget(engine)}
        if url is not None:
            targets["llama-server"] = await stack.enter_async_context(http_target(url))
        figures: dict[str, list[float]] = {name: [] for name in targets}
        for index in range(-1, options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            for name, target in targets.items():
                ttft_s = await next_ttft_s(target, index)
                if index >= 0:
                    figures[name].append(ttft_s)
    for name, values in figures.items():
        report.add(
            system=name, next_ttft_s=median(values), worst_s=percentile(values, 100)
        )
    report.details |= figures
    report.claim("next_ttft_s", median(figures["ours"]), "<=", 0.35)


def main() -> int:
    """Run the script."""
    return run_script("leave", measure, arguments(__doc__))


if __name__ == "__main__":
    sys.exit(main())
