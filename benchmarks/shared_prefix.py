"""
Requests with one long prefix: 512 words the same, 16 of their own, 32 tokens out.

32 requests by 8 clients; each round has a new prefix. Steps are as large as those of the
servers. The bound is a loop on the native layer that computes the prefix once, forks it,
and decodes 8 at a time: what no cache can beat. It has no scheduler, text or stream, and a
process of its own, since two pools of OpenMP threads in one slow each other. It runs before
and after ours: a margin of a few hundredths is less than what a machine drifts in a round.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import harmonic_mean, median
from time import perf_counter

import anyio
from load.client import (
    Call,
    EngineTarget,
    Run,
    Target,
    closed_loop,
    open_engine,
)
from load.measure import Report, arguments, median_ratio, parse, say
from load.workloads import shared_prefix
from peers.llama_server import llama_server
from peers.raw_client import http_target
from peers.xllamacpp_server import xllamacpp_server

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowSampler, RowSamplers

N_CLIENTS, N_SLOTS, N_CTX, N_OUTPUT = 8, 8, 8192, 32
N_BATCH = 2048
BOUND = "native fork (bound)"


@dataclass
class Forking:
    """The bound: slot N_SLOTS keeps the prefix, the others fork it."""

    model: Model
    context: Context

    def __post_init__(self) -> None:
        self._batch = Batch(self.context.n_batch)
        self._samplers = RowSamplers(N_SLOTS)
        self._samplers.set_all([RowSampler()] * N_SLOTS)

    def run(self, prefix: str, ends: list[str]) -> float:
        """Output tokens a second."""
        started = perf_counter()
        self.context.clear()
        tokens = self._tokenize(prefix, first=True)
        self._batch.clear()
        self._batch.add(tokens, 0, N_SLOTS, output=False)
        self.context.decode(self._batch)
        for first in range(0, len(ends), N_SLOTS):
            self._generate(len(tokens), ends[first : first + N_SLOTS])
        return len(ends) * N_OUTPUT / (perf_counter() - started)

    def _generate(self, n_prefix: int, ends: list[str]) -> None:
        batch, slots = self._batch, list(range(len(ends)))
        batch.clear()
        pos = []
        for slot, end in enumerate(ends):
            self.context.seq_rm(slot)
            self.context.seq_cp(N_SLOTS, slot)
            own = self._tokenize(end, first=False)
            batch.add(own, n_prefix, slot, output=True)
            pos.append(n_prefix + len(own))
        sampled = self._step()
        for _ in range(N_OUTPUT - 1):
            batch.clear()
            batch.add_rows(sampled, pos, slots)
            sampled = self._step()
            pos = [p + 1 for p in pos]

    def _step(self) -> list[int]:
        outcome = self.context.step(self._batch, self._samplers)
        if outcome.code != 0:
            raise RuntimeError(f"llama_decode returned {outcome.code}")
        return outcome.tokens

    def _tokenize(self, text: str, *, first: bool) -> list[int]:
        vocab = self.model.vocab
        return list(vocab.tokenize(text, add_special=first, parse_special=False))


@cache
def forking(path: Path, n_threads: int) -> Forking:
    """The bound; a process keeps it."""
    model = Model.load(path)
    sizes = {"n_ctx": N_CTX, "n_seq_max": N_SLOTS + 1, "n_threads": n_threads}
    return Forking(model, Context(model, **sizes))


def bound(options: Namespace, prefix: str, ends: list[str]) -> float:
    """Output tokens a second of the bound. Runs in its process."""
    return forking(options.model, options.threads).run(prefix, ends)


async def measure(
    options: Namespace,
    report: Report,
    urls: dict[str, str],
    process: ProcessPoolExecutor,
) -> None:
    """Interleaved rounds of all systems, after one that does not count."""
    runs: dict[str, list[Run]] = {}
    bounds: list[float] = []
    async with AsyncExitStack() as stack:
        opening = open_engine(
            options,
            n_slots=N_SLOTS,
            n_ctx=N_CTX,
            token_budget=N_BATCH,
            prefill_quantum=N_BATCH,
        )
        engine = await stack.enter_async_context(opening)
        targets: dict[str, Target] = {"ours": EngineTarget(engine)}
        for name, url in urls.items():
            targets[name] = await stack.enter_async_context(http_target(url))
        for index in range(-1, options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            prefix, ends = shared_prefix(index, options.requests)
            around = []
            for name, target in targets.items():
                calls = [Call(prefix + end, N_OUTPUT) for end in ends]
                if name == "ours":
                    around.append(await speed_of_bound(process, options, prefix, ends))
                run = await closed_loop(target, calls, N_CLIENTS)
                if name == "ours":
                    around.append(await speed_of_bound(process, options, prefix, ends))
                if index >= 0:
                    runs.setdefault(name, []).append(run)
            if index >= 0:
                bounds.append(harmonic_mean(around))
    conclude(report, runs, bounds)


async def speed_of_bound(
    process: ProcessPoolExecutor, options: Namespace, prefix: str, ends: list[str]
) -> float:
    """Output tokens a second: it does the same work before and after ours."""
    future = process.submit(bound, options, prefix, ends)
    return await anyio.to_thread.run_sync(future.result)


def conclude(report: Report, runs: dict[str, list[Run]], bounds: list[float]) -> None:
    """Ratios are ours to the system of the row."""
    ours = runs["ours"]
    speed = [run.output_tok_per_s for run in ours]
    ttft = [run.ttft_s(99) for run in ours]
    for name, theirs in runs.items():
        their_speed = [run.output_tok_per_s for run in theirs]
        their_ttft = [run.ttft_s(99) for run in theirs]
        faster = median_ratio(speed, their_speed)
        sooner = median_ratio(ttft, their_ttft)
        report.add(
            system=name,
            output_tok_per_s=median(their_speed),
            ours_to_it=faster,
            ttft_p99_s=median(their_ttft),
            ttft_ours_to_it=sooner,
            cached_tokens=median(run.n_cached for run in theirs),
        )
        if name != "ours":
            report.claim(f"output_tok_per_s to {name}", faster, ">=", 2.5)
            report.claim(f"ttft_p99 to {name}", sooner, "<=", 0.2)
        report.details[name] = {"output_tok_per_s": their_speed, "ttft_p99": their_ttft}
    ratio = median_ratio(speed, bounds)
    report.claim(f"output_tok_per_s to {BOUND}", ratio, ">=", 0.95)
    report.add(system=BOUND, output_tok_per_s=median(bounds), ours_to_it=ratio)
    report.details[BOUND] = bounds


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=32)
    options = parse(parser)
    report = Report("shared_prefix", options)
    with ExitStack() as stack:
        urls = {}
        if not options.no_peers:
            for start in (llama_server, xllamacpp_server):
                server = start(
                    options.model, n_slots=N_SLOTS, n_ctx=N_CTX, threads=options.threads
                )
                urls[start.__name__] = stack.enter_context(server)
        process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        stack.enter_context(process)
        anyio.run(measure, options, report, urls, process)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
