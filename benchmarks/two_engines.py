"""
Two engines on one model: what the second one takes, and whether they slow each other.

Each round does the same calls three times, in changing order: one engine alone, with a
second one open that idles, and half of them in each engine at once. Memory is what the
process holds more when the second engine has done its calls than before it was opened;
its context is what libllama says that its buffers take.
"""

from __future__ import annotations

import logging
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from statistics import median
from time import perf_counter

import anyio
from load.client import Call, EngineTarget, closed_loop
from load.machine import settled_rss_bytes
from load.measure import Report, arguments, median_ratio, run_script, say
from load.workloads import token_prompts

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    Model,
    SchedulerConfig,
)

N_SLOTS, N_CTX, N_PROMPT, N_OUTPUT = 4, 2048, 64, 64
CASES = ("alone", "beside an idle one", "both")


def config(options: Namespace) -> EngineConfig:
    return EngineConfig(
        context=ContextConfig(n_ctx=N_CTX, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
        cache=CacheConfig(mode="off"),
    )


async def run(engines: Sequence[AsyncEngine], calls: Sequence[Call]) -> float:
    """Output tokens a second of *calls*, which the engines share."""
    n_tokens = 0

    async def work(engine: AsyncEngine, own: Sequence[Call]) -> None:
        nonlocal n_tokens
        done = await closed_loop(EngineTarget(engine), own, N_SLOTS)
        n_tokens += sum(record.n_output for record in done.records)

    began = perf_counter()
    async with anyio.create_task_group() as group:
        for index, engine in enumerate(engines):
            group.start_soon(work, engine, calls[index :: len(engines)])
    return n_tokens / (perf_counter() - began)


class Heard(logging.Handler):
    """The lines of libllama's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @property
    def context_bytes(self) -> int:
        """What libllama has said that the buffers of contexts take."""
        sizes = re.findall(r"buffer size = +([\d.]+) MiB", "\n".join(self.lines))
        return int(sum(map(float, sizes)) * 2**20)


@contextmanager
def heard() -> Iterator[Heard]:
    """What libllama says in the block."""
    log, handler = logging.getLogger("pyllama_raw.libllama"), Heard()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.removeHandler(handler)


async def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds, after one that does not count."""
    speeds: dict[str, list[float]] = {case: [] for case in CASES}
    grown: list[float] = []
    async with (
        Model.open(options.model) as model,
        AsyncEngine.open(model, config(options)) as first,
    ):
        for index in range(-1, options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            prompts = token_prompts(options.model, index, [N_PROMPT] * options.requests)
            calls = [Call(prompt, N_OUTPUT) for prompt in prompts]
            figures, share = await _round(model, first, calls, options, index)
            if index >= 0:
                grown.append(share)
                for case, speed in figures.items():
                    speeds[case].append(speed)
    alone = speeds["alone"]
    for case, values in speeds.items():
        ratio = median_ratio(values, alone)
        report.add(case=case, tok_per_s=median(values), to_alone=ratio)
    report.details |= {"tok_per_s": speeds, "memory_to_context": grown}
    idle, both = (median_ratio(speeds[case], alone) for case in CASES[1:])
    report.claim("beside_an_idle_one_to_alone", idle, ">=", 0.99)
    report.claim("both_to_alone", both, ">=", 0.95)
    report.claim("memory_of_second_to_its_context", median(grown), "<=", 1.1)


async def _round(
    model: Model,
    first: AsyncEngine,
    calls: Sequence[Call],
    options: Namespace,
    index: int,
) -> tuple[dict[str, float], float]:
    """Tokens a second by case, and what the second engine takes to its context."""
    figures = {}
    cases = CASES[1:] if index % 2 else CASES[:0:-1]
    if index % 2:
        figures["alone"] = await run([first], calls)
    async with AsyncExitStack() as stack:
        before = settled_rss_bytes()
        opening = AsyncEngine.open(model, config(options))
        with heard() as lines:
            second = await stack.enter_async_context(opening)
        await run([second], calls[:N_SLOTS])
        for case in cases:
            engines = [first, second] if case == "both" else [first]
            figures[case] = await run(engines, calls)
        share = (settled_rss_bytes() - before) / lines.context_bytes
    if not index % 2:
        figures["alone"] = await run([first], calls)
    return figures, share


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=16, help="a case (16)")
    return run_script("two_engines", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
