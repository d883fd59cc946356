"""Engines with tiny projectors, for tests of images and sounds in prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pyllama_raw import (
    CacheConfig,
    ContextConfig,
    Engine,
    EngineConfig,
    Image,
    MediaConfig,
    SamplingParams,
    SchedulerConfig,
)
from scripts.mutations.gguf_file import read
from scripts.tiny_models.projectors import PROJECTORS, write
from tests.media.files import pixels
from tests.support.tiny import tiny_projector

N_SLOTS = 8
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def config(
    path: Path,
    *,
    context: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    **media: Any,
) -> Any:
    return EngineConfig(
        context=ContextConfig(**(context or {})),
        cache=CacheConfig(**(cache or {})),
        media=MediaConfig(mmproj=path, **media),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
    )


@contextmanager
def opened(name: str, path: Path | None = None, **options: Any) -> Iterator[Engine]:
    """An engine with the tiny projector *name*, or that at *path* on its model."""
    projector, model = tiny_projector(name)
    with Engine.open(model, config(path or projector, **options)) as engine:
        yield engine


def picture(seed: int = 0, width: int = 40, height: int = 30) -> Image:
    return Image(pixels(width, height, seed))


def deep_projector(path: Path) -> Path:
    """A llava with layers that take a while: cancels come in the midst of an encode."""
    deep = replace(
        PROJECTORS["llava"], size=224, n_layer=9, n_embd=128, n_ff=512, n_head=4
    )
    write(deep, path)
    return path


def nan_projector(path: Path) -> Path:
    """A llava that gives no numbers."""
    file = read(tiny_projector("llava")[0])
    bias = next(tensor for tensor in file.tensors if tensor.name == b"mm.2.bias")
    bias.data = np.full(len(bias.data) // 4, np.nan, np.float32).tobytes()
    path.write_bytes(file.encode())
    return path
