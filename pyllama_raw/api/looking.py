"""Facts that are known before a model is loaded: of the model, its memory, and the devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyllama_raw.options.arguments import check_opening

if TYPE_CHECKING:
    from pyllama_raw.engine.estimate import MemoryEstimate
    from pyllama_raw.engine.model_probe import Device, ModelProbe
    from pyllama_raw.options.config import EngineConfig


def estimate_memory(
    model: str | Path | None = None, config: EngineConfig | None = None
) -> MemoryEstimate:
    """
    Bytes that an engine of *model* and *config* will take of each device.

    libllama reckons them; no weight is read.

    Args:
        model: as AsyncEngine.open() takes it.

    Raises:
        ConfigError: an argument or option is wrong.
        ModelLoadFailed, ContextFailed, ProjectorLoadFailed, Unsupported: it could not be
            opened.
    """
    from pyllama_raw.engine.estimate import estimate

    return estimate(*_checked(model, config))


def probe(
    model: str | Path | None = None, config: EngineConfig | None = None
) -> ModelProbe:
    """
    Facts of *model*, and of the projector in *config*, without reading a weight.

    Raises:
        ConfigError, ModelLoadFailed, ContextFailed, ProjectorLoadFailed, Unsupported: as
            estimate_memory().
    """
    from pyllama_raw.engine.model_probe import probe_model

    return probe_model(*_checked(model, config))


def devices() -> tuple[Device, ...]:
    """Each device that libllama found, the CPU included, with its free memory of now."""
    from pyllama_raw.engine.model_probe import devices as found

    return found()


def _checked(
    model: str | Path | None, config: EngineConfig | None
) -> tuple[Path, EngineConfig]:
    from pyllama_raw.options.config import EngineConfig
    from pyllama_raw.options.models import resolve_model, with_projector

    check_opening(model, config, None, None)
    path = resolve_model(model)
    found = with_projector(config, model, path)
    return path, EngineConfig() if found is None else found
