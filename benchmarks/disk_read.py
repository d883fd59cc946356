"""
How long running streams wait while the state of a long prompt is read from a file.

One engine computes a prompt whose state takes 100 MiB or more, and writes it when it
closes. Another one runs 6 streams (32 tokens in); once each has 32 tokens, the prompt comes
again, with two more tokens. The figure is the longest gap of any stream until that prompt
is in its slot, by the median gap of all streams before it came; the longest gap before it
came tells what the machine does by itself. The gap after that is shown
apart: the step that computes the last tokens of the prompt has thousands of tokens to look
at, wherever they came from.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import anyio
from load.measure import Report, arguments, run_script, say
from load.workloads import token_prompts

from pyllama_raw import AsyncEngine, EngineConfig, SamplingParams

N_STREAMS, N_PROMPT, N_BEFORE, N_OUTPUT = 6, 32, 64, 512
N_FIRST = 8  # gaps of a stream in which others still begin
N_LONG, N_CTX = 4800, 16384
MIN_BYTES = 100 * 2**20
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_OUTPUT, ignore_eos=True)


class Gaps(NamedTuple):
    """Times between the tokens of streams, in milliseconds."""

    step_ms: float  # median before the prompt came
    before_ms: float  # the longest before that
    longest_ms: float  # the longest until the prompt was in its slot
    last_ms: float  # the longest of the next step


@dataclass
class Stream:
    """When the tokens of one stream came, in seconds."""

    times: list[float] = field(default_factory=list)

    def gaps(self, start: float, end: float) -> list[float]:
        """
        Those that overlap with [start, end], but for those after it.

        The last one ends with the step that ends at *end*.
        """
        last = min(self.times, key=lambda time: abs(time - end))
        pairs = zip(self.times, self.times[1:], strict=False)
        return [b - a for a, b in pairs if start < b <= last]


def config(options: Namespace, directory: Path) -> EngineConfig:
    """Unified memory, files, and nothing in host memory but what is on its way."""
    return EngineConfig.model_validate(
        {
            "context": {"n_ctx": N_CTX, "n_threads": options.threads},
            "scheduler": {"n_slots": N_STREAMS + 2},
            "cache": {"mode": "live", "directory": directory, "max_bytes": 2**30},
        }
    )


async def write(options: Namespace, directory: Path, prompt: list[int]) -> int:
    """Compute *prompt* and leave its file; returns the bytes."""
    async with AsyncEngine.open(options.model, config(options, directory)) as engine:
        await engine.complete(prompt, GREEDY.model_copy(update={"max_tokens": 1}))
    return size_of(directory)


def size_of(directory: Path) -> int:
    """Bytes of the largest state in *directory*."""
    return max(path.stat().st_size for path in directory.glob("*.plrstate"))


async def read(
    options: Namespace, directory: Path, prompts: list[list[int]]
) -> tuple[Gaps, float]:
    """Of all streams; and how long the first token of the last of *prompts* took."""
    streams = [Stream() for _ in prompts[:-1]]
    ready = anyio.Event()

    async def run(engine: AsyncEngine, stream: Stream, prompt: list[int]) -> None:
        async with engine.generate(prompt, GREEDY) as deltas:
            async for _ in deltas:
                stream.times.append(perf_counter())
                if all(len(other.times) >= N_BEFORE for other in streams):
                    ready.set()

    async with (
        AsyncEngine.open(options.model, config(options, directory)) as engine,
        anyio.create_task_group() as group,
    ):
        for stream, prompt in zip(streams, prompts, strict=False):
            group.start_soon(run, engine, stream, prompt)
        await ready.wait()
        start = perf_counter()
        late = [*prompts[-1], *prompts[0][:2]]
        result = await engine.complete(
            late, GREEDY.model_copy(update={"max_tokens": 1})
        )
        end = perf_counter()
        group.cancel_scope.cancel()
    if result.usage.cache_tier != "disk":
        raise RuntimeError(f"it came from {result.usage.cache_tier}")
    before = [gap for stream in streams for gap in stream.gaps(0.0, start)[N_FIRST:-1]]
    within = [stream.gaps(start, end) for stream in streams]
    longest = max(gap for gaps in within for gap in gaps[:-1])
    last = max(gaps[-1] for gaps in within)
    figures = (median(before), max(before), longest, last)
    return Gaps(*(1e3 * seconds for seconds in figures)), end - start


async def measure(options: Namespace, report: Report) -> None:
    """Rounds, each with a file of its own."""
    ratios = []
    for index in range(options.rounds):
        say(f"round {index + 1} of {options.rounds}")
        lengths = [N_PROMPT] * N_STREAMS + [N_LONG]
        prompts = token_prompts(options.model, index, lengths)
        with tempfile.TemporaryDirectory() as name:
            n_bytes = await write(options, Path(name), prompts[-1])
            gaps, wait_s = await read(options, Path(name), prompts)
        if n_bytes < MIN_BYTES:
            raise RuntimeError(f"a file of {n_bytes} bytes is too small")
        ratios.append(gaps.longest_ms / gaps.step_ms)
        mib = n_bytes / 2**20
        report.add(
            round=index, mib=mib, **gaps._asdict(), wait_s=wait_s, ratio=ratios[-1]
        )
    report.claim("longest_gap_to_median_step", median(ratios), "<=", 1.25)


if __name__ == "__main__":
    sys.exit(run_script("disk_read", measure, arguments(__doc__)))
