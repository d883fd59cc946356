"""
How long running streams wait for a long prompt that arrives.

6 streams (32 tokens in, 64 out) run; once each has 8 tokens, a prompt of 900 tokens (16
out) comes. ITL is over the streams' gaps. The bounded budget is the default; unbounded
takes n_batch tokens a step.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import anyio
from load.client import Call, Record, Target, ask, engine_target
from load.measure import Report, arguments, median_ratio, percentile, run_script, say
from load.workloads import token_prompts
from peers.llama_server import optional_server
from peers.raw_client import http_target

N_STREAMS, N_SLOTS, N_CTX = 6, 8, 8192
N_PROMPT, N_OUTPUT, N_LONG, N_LONG_OUTPUT = 32, 64, 900, 16
N_BEFORE = 8  # tokens each stream has when the long prompt comes
N_BATCH = 2048
MAX_CACHED = 16  # tokens: prompts may begin with the same words


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of the workload."""

    itl_s: list[float]
    long_ttft_s: float
    tok_per_s: float  # prompt and output, all calls


async def workload(target: Target, prompts: list[list[int]]) -> Outcome:
    """All but the last of *prompts* are streams, the last is the long one."""
    started = perf_counter()
    all_ready = anyio.Event()
    records: list[Record] = []

    ready: set[int] = set()

    def is_ready(record: Record) -> None:
        # Tokens, not deltas: a late reader finds them merged.
        if record.n_output >= N_BEFORE:
            ready.add(id(record))
        if len(ready) == N_STREAMS:
            all_ready.set()

    async def stream(prompt: list[int]) -> None:
        records.append(await ask(target, Call(prompt, N_OUTPUT), is_ready))

    async with anyio.create_task_group() as group:
        for prompt in prompts[:-1]:
            group.start_soon(stream, prompt)
        await all_ready.wait()
        late = await ask(target, Call(prompts[-1], N_LONG_OUTPUT))
    wall_s = perf_counter() - started
    n_cached = sum(record.n_cached or 0 for record in [*records, late])
    if n_cached > MAX_CACHED:
        raise RuntimeError(f"{n_cached} prompt tokens came from a cache")
    n_tokens = sum(map(len, prompts)) + N_STREAMS * N_OUTPUT + N_LONG_OUTPUT
    gaps = [gap for record in records for gap in record.itl_s]
    return Outcome(gaps, late.ttft_s, n_tokens / wall_s)


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds of all systems; each begins with a run that does not count."""
    ours = partial(engine_target, options, n_slots=N_SLOTS, n_ctx=N_CTX)
    targets: dict[str, Callable[[], AbstractAsyncContextManager[Target]]] = {
        "ours": ours,
        "ours, unbounded": partial(ours, token_budget=N_BATCH),
    }
    with optional_server(options, n_slots=N_SLOTS, n_ctx=N_CTX) as url:
        if url is not None:
            targets["llama-server"] = partial(http_target, url)
        outcomes: dict[str, list[Outcome]] = {name: [] for name in targets}
        lengths = [N_PROMPT] * N_STREAMS + [N_LONG]
        for index in range(options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            warm_up = token_prompts(options.model, -1 - index, lengths)
            prompts = token_prompts(options.model, index, lengths)
            for name, engine in targets.items():
                async with engine() as target:
                    await workload(target, warm_up)
                    outcomes[name].append(await workload(target, prompts))
    conclude(report, outcomes)


def conclude(report: Report, outcomes: Mapping[str, list[Outcome]]) -> None:
    """Percentiles are of one round; the median of the rounds is shown."""
    p99 = {}
    for name, runs in outcomes.items():
        itl_ms = {
            f"itl_{label}_ms": median(percentile(r.itl_s, p) for r in runs) * 1e3
            for label, p in (("p50", 50), ("p99", 99), ("max", 100))
        }
        p99[name] = itl_ms["itl_p99_ms"] / 1e3
        report.add(
            system=name,
            **itl_ms,
            long_ttft_s=median(r.long_ttft_s for r in runs),
            tok_per_s=median(r.tok_per_s for r in runs),
        )
        report.details[name] = [
            {"itl_s": r.itl_s, "ttft_s": r.long_ttft_s, "tok_per_s": r.tok_per_s}
            for r in runs
        ]
    bounded, free = outcomes["ours"], outcomes["ours, unbounded"]
    ratio = median_ratio([r.tok_per_s for r in bounded], [r.tok_per_s for r in free])
    report.claim("throughput_bounded_to_unbounded", ratio, ">=", 0.93)
    report.claim("itl_p99_s", p99["ours"], "<=", 0.35)


def main() -> int:
    """Run the script."""
    return run_script("interference", measure, arguments(__doc__))


if __name__ == "__main__":
    sys.exit(main())
