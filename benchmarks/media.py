"""
Gaps of running streams while images are encoded.

8 streams run; then 4 requests come, each with an image of its own, whose encode takes 2 s or
more alone. The projector has random weights and the width of the model. A gap is what a
reader of a stream sees between two tokens. It may have a step, and a layer of the encoder:
1.25 times target_step_s and a layer is the limit, in every round, for gaps less the time in them
that a hypervisor took the CPUs away. llama-server has the same files, load and cells; its gaps
are shown beside ours, of one round.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from argparse import Namespace
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import sub
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol

import anyio
import numpy as np
from load.machine import stolen_s
from load.measure import NO_DRAFTS, Report, arguments, run_script, say
from load.workloads import token_prompts
from peers.llama_server import llama_server
from peers.raw_client import RawClient

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    Image,
    MediaConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.api.results import percentile
from pyllama_raw.core.costs import GOAL_S

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.tiny_models.projectors import PROJECTORS, write

N_STREAMS, N_IMAGES, N_PROMPT = 8, 4, 32
N_SLOTS = N_STREAMS + N_IMAGES
N_CTX_SLOT = 2048
N_FIRST = 8  # tokens of a stream before it counts
MAX_ALONE_S = 2.0  # of streams alone, before the images
N_STREAM, N_ANSWER = N_CTX_SLOT - 64, 8  # tokens; no stream comes to its end
BEFORE, AFTER = "Look: ", " What is it?"


class Gap(NamedTuple):
    """Between two tokens of a stream."""

    seconds: float
    stolen_s: float  # of these


@dataclass
class Times:
    """When tokens of a stream came, and what had been stolen by then."""

    at: list[tuple[float, float]] = field(default_factory=list)
    runs: anyio.Event = field(default_factory=anyio.Event)  # for some tokens

    def take(self) -> None:
        self.at.append((perf_counter(), stolen_s()))
        if len(self.at) == N_FIRST:
            self.runs.set()

    def gaps(self, since: float, until: float) -> list[Gap]:
        return [
            Gap(end - start, after - before)
            for (start, before), (end, after) in pairwise(self.at)
            if since <= end and start <= until
        ]


@contextmanager
def projector(width: int, options: Namespace) -> Iterator[Path]:
    """A llava as deep and for images as large as *options* say."""
    shape = replace(
        PROJECTORS["llava"],
        size=options.size,
        n_layer=options.layers + 1,  # the last one is not used
        n_embd=options.embd,
        n_ff=4 * options.embd,
        n_head=options.embd // 64,
        width=width,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "projector.gguf"
        write(shape, path)
        yield path


def picture(seed: int, size: int) -> bytes:
    """A BMP file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    n_bytes = pixels.nbytes
    sizes = (54 + n_bytes, 0, 0, 54, 40, size, size, 1, 24, 0, n_bytes, 0, 0, 0, 0)
    return struct.pack("<2sIHHIIiiHHIIiiII", b"BM", *sizes) + pixels.tobytes()


class System(Protocol):
    """What is measured."""

    async def stream(self, prompt: list[int], take: Callable[[], None]) -> None:
        """Generate until it is cancelled; *take* is called with each token."""

    async def ask(self, picture: bytes) -> None:
        """Have *picture* described."""


class Ours:
    """Our engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.encode_s: list[float] = []

    async def stream(self, prompt: list[int], take: Callable[[], None]) -> None:
        params = SamplingParams(max_tokens=N_STREAM, temperature=0, ignore_eos=True)
        async with self._engine.generate(prompt, params) as generation:
            async for _ in generation:
                take()

    async def ask(self, picture: bytes) -> None:
        params = SamplingParams(max_tokens=N_ANSWER, temperature=0, ignore_eos=True)
        prompt = [BEFORE, Image(picture), AFTER]
        result = await self._engine.complete(prompt, params)
        self.encode_s.append(result.timings.encode_s or 0.0)


class LlamaServer:
    """llama-server with the same projector."""

    def __init__(self, url: str) -> None:
        self._client = RawClient(url, {})

    async def stream(self, prompt: list[int], take: Callable[[], None]) -> None:
        body = {"prompt": prompt, "n_predict": N_STREAM, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        await self._client.post(
            "/completion", body, lambda line: line.startswith(b"data: {") and take()
        )

    async def ask(self, picture: bytes) -> None:
        url = f"data:image/bmp;base64,{b64encode(picture).decode()}"
        content = [
            {"type": "text", "text": BEFORE},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": AFTER},
        ]
        body = {"messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": N_ANSWER, "temperature": 0, "ignore_eos": True}
        await self._client.post("/v1/chat/completions", body, lambda _: None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of the load."""

    before: list[Gap]  # of all streams before the images come
    gaps: list[Gap]  # and then
    n_running: int  # streams that have not ended
    wall_s: float  # of the images


async def load(
    system: System, options: Namespace, index: int, wait_s: float
) -> Outcome:
    """Streams for *wait_s*; then the images, until all of them are described."""
    prompts = token_prompts(options.model, index, [N_PROMPT] * N_STREAMS)
    streams = [Times() for _ in prompts]
    async with anyio.create_task_group() as running:
        for prompt, times in zip(prompts, streams, strict=True):
            running.start_soon(system.stream, prompt, times.take)
        for times in streams:
            await times.runs.wait()
        begin = perf_counter()
        await anyio.sleep(wait_s)
        come = perf_counter()
        async with anyio.create_task_group() as asking:
            for i in range(N_IMAGES):
                seed = 100 + index * N_IMAGES + i
                asking.start_soon(system.ask, picture(seed, options.size))
        end = perf_counter()
        running.cancel_scope.cancel()
    return Outcome(
        [gap for times in streams for gap in times.gaps(begin, come)],
        [gap for times in streams for gap in times.gaps(come, end)],
        sum(len(times.at) < N_STREAM for times in streams),
        end - come,
    )


async def measure(options: Namespace, report: Report) -> None:
    from pyllama_raw.engine.info import probe

    width = probe(options.model).model.n_embd
    with projector(width, options) as path:
        alone_s = await measure_ours(options, report, path)
        if not options.no_peers:
            await measure_llama_server(options, report, path, alone_s)
    ours = [row for row in report.rows if row["system"] == "ours"]
    longest = [float(str(row["longest_own_s"])) for row in ours]
    step_s = SchedulerConfig().target_step_s or GOAL_S
    limit = 1.25 * (step_s + alone_s / options.layers)
    report.claim(
        "longest own gap of a stream in all rounds, s", max(longest), "<=", limit
    )


async def measure_ours(options: Namespace, report: Report, path: Path) -> float:
    """Seconds of an encode alone."""
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_SLOTS * N_CTX_SLOT, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
        media=MediaConfig(mmproj=path),
    )
    async with AsyncEngine.open(options.model, config) as engine:
        ours = Ours(engine)
        for seed in (1, 2):
            await ours.ask(picture(seed, options.size))
        alone_s = min(ours.encode_s)
        say(f"an encode alone: {alone_s:.2f} s")
        n_rounds = options.rounds
        await rounds("ours", ours, options, report, alone_s=alone_s, n_rounds=n_rounds)
        n_encodes = engine.stats().encodes
    report.claim("seconds of an encode alone", alone_s, ">=", options.min_encode_s)
    report.claim("encodes", n_encodes, ">=", 2 + N_IMAGES * options.rounds)
    return alone_s


async def measure_llama_server(
    options: Namespace, report: Report, path: Path, alone_s: float
) -> None:
    server = llama_server(
        options.model,
        n_slots=N_SLOTS,
        n_ctx=N_SLOTS * N_CTX_SLOT,
        threads=options.threads,
        flags=("--mmproj", str(path)),
    )
    with server as url:
        system = LlamaServer(url)
        await system.ask(picture(1, options.size))
        await rounds(
            "llama-server", system, options, report, alone_s=alone_s, n_rounds=1
        )


async def rounds(
    name: str,
    system: System,
    options: Namespace,
    report: Report,
    *,
    alone_s: float,
    n_rounds: int,
) -> None:
    wait_s = min(alone_s, MAX_ALONE_S)
    for index in range(n_rounds):
        say(f"{name}, round {index + 1} of {n_rounds}")
        figures = await load(system, options, index, wait_s)
        assert figures.n_running == N_STREAMS, "a stream came to its end"
        before, gaps = (
            [gap.seconds for gap in some] for some in (figures.before, figures.gaps)
        )
        stolen = [gap.stolen_s for gap in figures.gaps]
        speeds = len(figures.gaps) / figures.wall_s, len(figures.before) / wait_s
        report.add(
            system=name,
            round=index,
            wall_s=round(figures.wall_s, 3),
            gap_before_p50_s=round(percentile(before, 50), 4),
            gap_p50_s=round(percentile(gaps, 50), 4),
            gap_p99_s=round(percentile(gaps, 99), 4),
            longest_s=round(max(gaps), 4),
            longest_own_s=round(max(map(sub, gaps, stolen)), 4),
            share=round(speeds[0] / speeds[1], 3),
        )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=56, help="of the encoder (56)")
    parser.add_argument("--embd", type=int, default=512, help="its width (512)")
    parser.add_argument("--size", type=int, default=336, help="of images, pixels (336)")
    parser.add_argument(
        "--min-encode-s", type=float, default=2.0, help="seconds alone at least (2)"
    )
    return run_script("media", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
