"""
10,000 requests of every fate: each ends once, no law is broken, no memory is lost.

Random lengths, priorities, deadlines, and clients that leave at random moments, a third of all.
Beside the first half runs one stream of 10,000 tokens, whose context is shifted again and again.
After each step the scheduler checks its conservation laws. Memory is read after each half; the
prefix cache is limited, so that it is full, and evicts, well before the first reading.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import ClassVar

import anyio
from load.client import open_engine
from load.machine import ROOT, settled_rss_bytes
from load.measure import Report, arguments, parse, say
from load.workloads import generator

from pyllama_raw import AsyncEngine, FinishReason, PyllamaError, SamplingParams
from pyllama_raw.core.request import Event, Finished
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import StepPlan, StepResult
from pyllama_raw.engine import build

N_CLIENTS, N_SLOTS, N_CTX = 32, 8, 512
CACHE_BYTES = 16 * 2**20
MAX_PROMPT, MAX_OUTPUT = 24, 12  # tokens, of the real model
LONG_OUTPUT = 10_000  # tokens of one stream
TINY_PROMPT, TINY_OUTPUT = 200, 200  # 8 do not fit the cells: some are preempted


class CheckedScheduler(Scheduler):
    """Checks itself after each step, and counts how often each request ends."""

    ends: ClassVar[Counter[int]] = Counter()

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        events = super().apply(plan, result, now)
        self.check_integrity()
        return events

    def take_events(self) -> list[Event]:
        events = super().take_events()
        self.ends.update(e.request_id for e in events if isinstance(e, Finished))
        return events


@dataclass(frozen=True, slots=True)
class Fate:
    """One request, and how long its client stays."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    deadline_s: float | None
    leave_s: float | None
    leave_after: int | None  # deltas


def fates(
    seed: int, count: int, n_vocab: int, max_prompt: int, max_output: int
) -> Iterator[Fate]:
    """One after the other, so that none takes memory; half of them may run to their end."""
    rng = generator(seed)
    return (_fate(rng, n_vocab, max_prompt, max_output) for _ in range(count))


def _fate(rng: Random, n_vocab: int, max_prompt: int, max_output: int) -> Fate:
    n_prompt = rng.randint(1, max_prompt)
    kinds = ("end", "deadline", "leave", "break")
    [fate] = rng.choices(kinds, weights=(50, 10, 10, 30))
    return Fate(
        prompt=[rng.randrange(n_vocab) for _ in range(n_prompt)],
        params=SamplingParams(
            max_tokens=rng.randint(1, max_output),
            temperature=rng.choice((0.0, 0.8)),
            seed=rng.randrange(2**31),
            ignore_eos=rng.random() < 0.5,
        ),
        priority=rng.randint(-2, 2),
        deadline_s=rng.uniform(0.001, 2.0) if fate == "deadline" else None,
        leave_s=rng.uniform(0.0, 0.2) if fate == "leave" else None,
        leave_after=rng.randint(0, 4) if fate == "break" else None,
    )


async def live(engine: AsyncEngine, fate: Fate) -> str:
    """Make the request; returns how the client saw it end."""
    with anyio.move_on_after(fate.leave_s):
        async with engine.generate(
            fate.prompt,
            fate.params,
            priority=fate.priority,
            deadline_s=fate.deadline_s,
        ) as generation:
            n_deltas = 0
            while n_deltas != fate.leave_after:
                if await anext(generation, None) is None:
                    return str(generation.result.finish_reason)
                n_deltas += 1
    return "left"


async def stream(engine: AsyncEngine, n_tokens: int) -> int:
    """One long output, which a client reads to its end; its tokens."""
    params = SamplingParams(max_tokens=n_tokens, seed=0, ignore_eos=True)
    async with engine.generate([1, 2, 3], params, priority=-9) as generation:
        async for _ in generation:
            pass
    return generation.result.usage.completion_tokens


async def half(
    engine: AsyncEngine, work: Iterator[Fate], counts: Counter[str], n_long: int
) -> tuple[int, int]:
    """
    Live all fates, wait until the engine is idle, and read the memory.

    Also the tokens of a long stream beside, of *n_long* tokens.
    """
    n_told = 0

    async def long() -> None:
        nonlocal n_told
        n_told = await stream(engine, n_long)

    async def client() -> None:
        for fate in work:
            try:
                counts[await live(engine, fate)] += 1
            except PyllamaError as error:
                counts[type(error).__name__] += 1

    async with anyio.create_task_group() as group:
        if n_long:
            group.start_soon(long)
        for _ in range(N_CLIENTS):
            group.start_soon(client)
    while engine.stats().running or engine.stats().waiting:  # noqa: ASYNC110
        await anyio.sleep(0.01)
    return settled_rss_bytes(), n_told


async def soak(options: Namespace, report: Report) -> None:
    """Two halves on one engine."""
    build.Scheduler = CheckedScheduler  # type: ignore[attr-defined]
    sizes = (TINY_PROMPT, TINY_OUTPUT) if options.tiny else (MAX_PROMPT, MAX_OUTPUT)
    counts: Counter[str] = Counter()
    rss: list[int] = []
    opening = open_engine(
        options,
        n_slots=N_SLOTS,
        n_ctx=N_CTX,
        cache_bytes=CACHE_BYTES,
        context_full="shift",
    )
    n_long = 0
    async with opening as engine:
        n_vocab = _n_vocab(options.model)
        for part in range(2):
            started = perf_counter()
            work = fates(part, options.requests // 2, n_vocab, *sizes)
            want = options.long if part == 0 else 0
            n_bytes, n_told = await half(engine, work, counts, want)
            rss.append(n_bytes)
            n_long += n_told
            say(f"half {part + 1}: {perf_counter() - started:.0f} s, {dict(counts)}")
        stats = engine.stats()
    ends = CheckedScheduler.ends
    report.add(
        model=options.model.name,
        requests=stats.submitted,
        steps=stats.steps,
        aborted_steps=stats.aborted_steps,
        preempted=stats.preempted,
        **stats.finished,
        failed=stats.failed,
        rss_mib=rss[1] / 2**20,
    )
    unhappy = counts.total() - counts["left"] - sum(counts[r] for r in FinishReason)
    more_than_once = sum(count != 1 for count in ends.values())
    report.claim("ended_not_once", more_than_once, "<=", 0)
    report.claim("never_ended", stats.submitted - len(ends), "<=", 0)
    report.claim("errors", unhappy + stats.failed, "<=", 0)
    report.claim("cancelled_of_all", counts["left"] / counts.total(), ">=", 0.3)
    report.claim("tokens_of_one_stream", n_long, ">=", options.long)
    report.claim("rss_second_half_to_first", rss[1] / rss[0], "<=", 1.02)
    report.details |= {"seen": dict(counts), "rss_bytes": rss}


def _n_vocab(model: Path) -> int:
    from pyllama_raw.native.model import Model

    with Model.load(model, vocab_only=True) as loaded:
        return loaded.n_vocab


def _tiny_model() -> Path:
    sys.path.append(str(ROOT))
    from tests.support.tiny import tiny_model

    return tiny_model("llama")


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--long", type=int, default=LONG_OUTPUT, help="tokens")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model")
    options = parse(parser)
    if options.tiny:
        options.model = _tiny_model()
    report = Report("soak", options, timed=False)
    anyio.run(soak, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
