"""
The runs whose calls are failed: what an engine is opened with, and what is asked of it.

Each job is one request, told by what it gives. All jobs of a round run at once; the second round
asks the same, so it finds what the first one has left in the cache, and shows that the engine
still serves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    Image,
    MediaConfig,
    SamplingParams,
    SchedulerConfig,
)
from tests.media.files import pixels
from tests.support.last_digits import steady_attention
from tests.support.tiny import tiny_adapter, tiny_model, tiny_projector

Job = Callable[[AsyncEngine], Awaitable[object]]

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
WATCHED = GREEDY.model_copy(update={"logprobs": 2, "prompt_logprobs": 1})
DRAWN = SamplingParams(
    max_tokens=8,
    temperature=0.9,
    seed=7,
    ignore_eos=True,
    repeat_penalty=1.1,
    dry_multiplier=0.5,
    xtc_probability=0.1,
    top_n_sigma=2.0,
)
GRAMMAR = SamplingParams(max_tokens=8, temperature=0, regex="[a-z ]{20,40}")
MIROSTAT = GREEDY.model_copy(
    update={"temperature": 1.0, "mirostat": 2, "seed": 3, "typical_p": 1.0}
)
START = [3 + 7 * i % 200 for i in range(40)]


@dataclass(frozen=True, slots=True)
class Run:
    """A run: the model, the options, and the jobs of each round."""

    model: Path
    config: EngineConfig
    jobs: tuple[Job, ...]
    adapters: tuple[str, ...] = ()
    n_opens: int = 1  # one after the other; the jobs are asked of each
    has_files: bool = False
    opens_later: bool = False  # its first request for vectors opens a context

    def folder(self) -> Any:
        """A folder for the files of one cell."""
        return tempfile.TemporaryDirectory() if self.has_files else nullcontext()

    def config_in(self, folder: str | None) -> EngineConfig:
        """The configuration, with its files in *folder*."""
        if folder is None:
            return self.config
        cache = self.config.cache.model_copy(update={"directory": Path(folder)})
        return self.config.model_copy(update={"cache": cache})


def _config(
    *, n_slots: int = 3, n_ctx: int = 768, deterministic: bool = False, **parts: Any
) -> EngineConfig:
    scheduler = parts.pop("scheduler", {})
    return EngineConfig(
        context=ContextConfig(
            n_ctx=n_ctx,
            n_threads=1,
            n_batch=64,
            n_ubatch=64,
            n_outputs_max=16,
            **steady_attention(),  # some are computed beside those that failed
        ),
        scheduler=SchedulerConfig(n_slots=n_slots, token_budget=64, **scheduler),
        deterministic=deterministic,
        **parts,
    )


def _tokens(
    prompt: list[int] | str, params: SamplingParams = GREEDY, **options: Any
) -> Job:
    async def job(engine: AsyncEngine) -> object:
        return (await engine.complete(prompt, params, **options)).token_ids

    return job


def _vector(text: str) -> Job:
    async def job(engine: AsyncEngine) -> object:
        return (await engine.embed([text], pooling="mean")).round(4).tolist()

    return job


def _picture(seed: int) -> Job:
    image = Image(pixels(40, 30, seed))

    async def job(engine: AsyncEngine) -> object:
        return (await engine.complete([image, "what is it"], GREEDY)).token_ids

    return job


TEXTS = (
    _tokens("hello there", WATCHED),
    _tokens([5, *START[:20]], DRAWN),
    _tokens("once upon", GRAMMAR),
    _tokens([6, 7, 8], MIROSTAT),
)
PREFIXES = (
    _tokens([*START, 9, 10, 11]),
    _tokens([*START[:30], 31, 32, 33], DRAWN),
    _tokens([50, 51, 52] * 9, priority=-1),
)
LONG = (_tokens(START[:9], GREEDY.model_copy(update={"max_tokens": 300})), *PREFIXES)
SMALL = CacheConfig(max_bytes=2**16, snapshot_interval_tokens=16)
POINTS = CacheConfig(max_bytes=2**20, snapshot_interval_tokens=16)
SWAPS = {"preempt": "priority"}


def runs() -> dict[str, Run]:
    """All runs by name."""
    llama, jamba = tiny_model("llama"), tiny_model("jamba")
    projector, seeing = tiny_projector("llava")
    media = MediaConfig(mmproj=projector)
    scales: list[dict[str, float]] = [{"lora-a": 1.0}, {"lora-b": 0.5, "control": 1.0}]
    adapted = (
        *(_tokens(START[:9], adapters=scale) for scale in scales),
        _tokens(START[:9]),
    )
    mixed = (_vector("hello there"), _vector("a b c"), _tokens([5, 6, 7]))
    files = {"has_files": True, "n_opens": 2}
    return {
        "texts": Run(llama, _config(deterministic=True), TEXTS),
        "pool": Run(llama, _config(n_slots=2, cache=SMALL, scheduler=SWAPS), PREFIXES),
        "split": Run(
            llama,
            _config(n_slots=2, deterministic=True, cache=SMALL, scheduler=SWAPS),
            PREFIXES,
        ),
        "exact": Run(
            jamba,
            _config(n_slots=2, deterministic=True, cache=SMALL, scheduler=SWAPS),
            PREFIXES,
        ),
        "chain": Run(
            jamba, _config(n_slots=2, cache=POINTS, scheduler=SWAPS), PREFIXES
        ),
        "sources": Run(
            tiny_model("t5"),
            _config(),
            (_tokens("hello there"), _tokens(START[:20], DRAWN), TEXTS[2]),
        ),
        "window": Run(
            tiny_model("gemma3"),
            _config(n_slots=2, deterministic=True, cache=SMALL),
            PREFIXES,
        ),
        "shift": Run(
            llama, _config(n_slots=2, scheduler={"context_full": "shift"}), LONG
        ),
        "lanes": Run(llama, _config(sampler_placement="backend"), TEXTS[1:]),
        "files": Run(llama, _config(n_slots=2), PREFIXES, **files),
        "exact files": Run(
            jamba, _config(n_slots=2, deterministic=True), PREFIXES, **files
        ),
        "vectors": Run(tiny_model("bert"), _config(), (mixed[0], mixed[1])),
        "vectors beside": Run(llama, _config(), mixed, opens_later=True),
        "images": Run(
            seeing, _config(media=media), (*map(_picture, range(2)), TEXTS[3])
        ),
        "adapters": Run(
            llama, _config(), adapted, adapters=("lora-a", "lora-b", "control")
        ),
    }


async def prepare(run: Run, engine: AsyncEngine) -> None:
    """What comes before the first round."""
    for name in run.adapters:
        await engine.load_adapter(name, tiny_adapter(name))
