"""
The models of a deployment as a cache: the memory that they may take, and how each is opened.

A model is another one if its file, its options or its adapters are; then a list that is read anew has it
loaded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

from anyio import to_thread

from pyllama_raw import AsyncEngine, EngineConfig, devices
from pyllama_raw.runners import CachedModel, LocalRunner, ModelCache
from pyllama_raw.serve.config import ModelsConfig
from pyllama_raw.serve.deployment import AdapterEntry, Deployment, ModelPlace

Loading = Callable[[str, float], None]
Options = tuple[str | None, EngineConfig | None]
Prepare = Callable[[str | None, EngineConfig | None], Options]
HOST = "CPU"
MARGIN_BYTES = 2**30  # of a device that stay free, or a 16th of a small one


async def model_cache(
    deployment: Deployment, loading: Loading, prepare: Prepare | None
) -> ModelCache:
    """The cache of the models of *deployment*, to be entered. Raises ConfigError."""
    config = deployment.loading
    return ModelCache(
        cached_models(deployment, loading, prepare),
        budget=await to_thread.run_sync(budget_of, config),
        max_models=config.models_max or None,
        max_wait_s=config.turn_wait_s,
        max_overtakes=config.max_model_overtakes,
        max_waiting=config.max_model_waiting,
    )


def budget_of(config: ModelsConfig) -> dict[str, int]:
    """Bytes that all models may take, by device: as the options say, else what is free now."""
    budget: dict[str, int] = {}
    for device in devices():
        if device.kind in ("cpu", "gpu", "igpu"):
            margin = min(MARGIN_BYTES, device.memory_total_bytes // 16)
            budget[device.name] = max(device.memory_free_bytes - margin, 1)
    if config.memory_bytes is not None:
        budget[HOST] = config.memory_bytes
    return {**budget, **config.memory}


def cached_models(
    deployment: Deployment, loading: Loading, prepare: Prepare | None
) -> dict[str, CachedModel]:
    """The models of *deployment*, none of which is loaded yet."""
    return {
        name: _cached(name, deployment, loading, prepare) for name in deployment.models
    }


def _cached(
    name: str, deployment: Deployment, loading: Loading, prepare: Prepare | None
) -> CachedModel:
    path, config = deployment.models[name], deployment.configs.get(name)
    adapters = deployment.adapters.get(name, ())
    place, of_all = deployment.places.get(name, ModelPlace()), deployment.loading

    def make(progress: Callable[[float], object]) -> LocalRunner:
        def report(fraction: float) -> None:
            progress(fraction)
            loading(name, fraction)

        return LocalRunner(
            path,
            config,
            name=name,
            prepare=prepare,  # type: ignore[arg-type]
            on_open=partial(_load_adapters, adapters),
            progress=report,
        )

    options = None if config is None else config.model_dump_json()
    return CachedModel(
        make,
        is_pinned=place.pinned,
        sleep_s=place.sleep_idle_s or of_all.sleep_idle_s or inf,
        unload_s=place.unload_idle_s or of_all.unload_idle_s or inf,
        key=(path, _file_key(path), options, adapters),
    )


async def _load_adapters(
    adapters: tuple[AdapterEntry, ...], engine: AsyncEngine
) -> None:
    for adapter in adapters:
        await engine.load_adapter(adapter.name, adapter.path)


def _file_key(path: str | None) -> tuple[int, int] | None:
    """What tells a file from one that took its place. None: it is not there, or not a file."""
    try:
        status = Path(path or "").stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size
