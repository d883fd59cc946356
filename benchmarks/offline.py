"""
Tokens a second of full slots, at several numbers of slots, against all.

Twice as many requests as slots, at least 8, of 128 tokens in and 64 out, sent all at once
to as many slots. llama-batched-bench, which does not sample, is the ceiling. Each system
is open only while it is measured and begins with calls that do not count. Cells: 256 a
slot for everyone.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from statistics import median

import anyio
from load.measure import NO_DRAFTS, Report, arguments, median_ratio, run_script, say
from load.workloads import token_prompts
from peers.batched_bench import batched_bench
from peers.openers import PEERS, peer_opener

from pyllama_raw import (
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SchedulerConfig,
)
from pyllama_raw.lab.calls import Call, closed_loop
from pyllama_raw.lab.targets import Opener, open_engine

N_PROMPT, N_OUTPUT, CELLS = 128, 64, 256
N_BATCH = 2048
CACHE_BYTES = 64 * 2**20  # full soon, and evicts, as in a server that has run a while
CEILING = "llama-batched-bench"
MAX_SEQUENCES = 256  # of libllama; snapshots need one beside the slots
MAX_CACHED = 16  # tokens a call: prompts may begin with the same words

# By slots: ours to the ceiling, ours to the best peer, at least.
LIMITS = {8: (1.00, 1.05)}
OTHER_LIMITS = (0.98, 1.03)

Speeds = dict[str, list[float]]


async def measure(options: Namespace, report: Report) -> None:
    """All numbers of slots, one after the other."""
    for n_slots in options.slots:
        speeds: Speeds = {}
        openers = _openers(options, n_slots)
        for index in range(options.rounds):
            say(f"{n_slots} slots, round {index + 1} of {options.rounds}")
            await _round(options, n_slots, index, openers, speeds)
        conclude(report, n_slots, speeds)


def _openers(options: Namespace, n_slots: int) -> dict[str, Opener]:
    n_ctx = CELLS * n_slots
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=n_ctx, n_threads=options.threads),
        # Steps as large as those of the others: nobody waits here for a bounded one.
        scheduler=SchedulerConfig(
            n_slots=n_slots, token_budget=N_BATCH, prefill_quantum=N_BATCH
        ),
        cache=CacheConfig(max_bytes=CACHE_BYTES)
        if n_slots < MAX_SEQUENCES
        else CacheConfig(mode="live"),
    )
    openers: dict[str, Opener] = {"ours": partial(open_engine, options.model, config)}
    sizes = {"n_slots": n_slots, "n_ctx": n_ctx, "threads": options.threads}
    for name in () if options.no_peers else options.peers:
        openers[name] = peer_opener(name, options.model, **sizes)
    return openers


async def _round(
    options: Namespace,
    n_slots: int,
    index: int,
    openers: Mapping[str, Opener],
    speeds: Speeds,
) -> None:
    """All systems in turn; who is first rotates."""
    n_calls = max(2 * n_slots, 8)
    names = [*openers, *(() if options.no_peers else (CEILING,))]
    first = index % len(names)
    for name in names[first:] + names[:first]:
        if name == CEILING:
            speed = await anyio.to_thread.run_sync(_ceiling, options, n_slots, n_calls)
        else:
            seed = 2 * index + 1000 * n_slots
            speed = await _speed(options, n_slots, n_calls, seed, openers[name])
        speeds.setdefault(name, []).append(speed)


async def _speed(
    options: Namespace, n_slots: int, n_calls: int, seed: int, opener: Opener
) -> float:
    """Tokens a second, prompt and output; a first batch does not count."""
    async with opener() as target:
        for count in (n_slots, n_calls):
            prompts = token_prompts(options.model, seed, [N_PROMPT] * count)
            calls = [Call(prompt, N_OUTPUT) for prompt in prompts]
            run = await closed_loop(target.target, calls, count)
            run.checked()
            seed += 1
    if run.n_cached > MAX_CACHED * n_calls:
        raise RuntimeError(f"{run.n_cached} tokens came from a cache")
    return n_calls * (N_PROMPT + N_OUTPUT) / run.wall_s


def _ceiling(options: Namespace, n_slots: int, n_calls: int) -> float:
    return batched_bench(
        options.model,
        n_prompt=N_PROMPT,
        n_output=N_OUTPUT,
        n_slots=n_slots,
        repeats=n_calls // n_slots,
        n_ctx=CELLS * n_slots,
        threads=options.threads,
    ).tok_per_s


def conclude(report: Report, n_slots: int, speeds: Speeds) -> None:
    """Ratios are ours to the system of the row."""
    ours = speeds["ours"]
    for name, theirs in sorted(speeds.items(), key=lambda item: item[0] != "ours"):
        report.add(
            slots=n_slots,
            system=name,
            tok_per_s=median(theirs),
            ours_to_it=median_ratio(ours, theirs),
            smallest=min(a / b for a, b in zip(ours, theirs, strict=True)),
            largest=max(a / b for a, b in zip(ours, theirs, strict=True)),
        )
    report.details[f"{n_slots} slots"] = speeds
    peers = {name: median_ratio(ours, v) for name, v in speeds.items() if name in PEERS}
    to_ceiling, to_peer = LIMITS.get(n_slots, OTHER_LIMITS)
    if CEILING in speeds:
        ratio = median_ratio(ours, speeds[CEILING])
        report.claim(f"{n_slots} slots, to {CEILING}", ratio, ">=", to_ceiling)
    if peers:
        best = min(peers, key=peers.__getitem__)
        name = f"{n_slots} slots, to the best peer ({best})"
        report.claim(name, peers[best], ">=", to_peer)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    return run_script("offline", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
