"""
All that `pyllama-raw serve` runs: models with their options, and the service.

A file says the same in TOML, in the names of the options:

    port = 8080
    [service]
    drain_s = 20
    [context]               # of all models
    n_ctx = 16384
    [models.assistant]      # the name that clients use
    path = "assistant.gguf"
    [models.assistant.scheduler]
    n_slots = 16
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from pyllama_raw import EngineConfig
from pyllama_raw.errors import ConfigError
from pyllama_raw.options.profile import Settings
from pyllama_raw.serve.config import ListenConfig, ServeConfig

OPTIONS = tuple(Settings.model_fields)  # parts of an EngineConfig


class Deployment(ListenConfig):
    """Models by the names that clients use, and where they are served."""

    service: ServeConfig = ServeConfig()
    """Options of the service."""
    models: dict[str, str | None] = Field(default_factory=dict)
    """Files by name. None: the default model."""
    configs: dict[str, EngineConfig] = Field(default_factory=dict)
    """Options of the engines, by name."""

    @classmethod
    def of(
        cls, fields: dict[str, Any], flags: dict[str, dict[str, Any]] | None = None
    ) -> Self:
        """
        What a file says, with *flags* by part, which win.

        Raises:
            ConfigError: names what is wrong.
        """
        fields = dict(fields)
        shared = Settings(**{n: fields.pop(n) for n in OPTIONS if n in fields})
        entries = fields.pop("models", None) or {"default": {}}
        models, configs = {}, {}
        for name, given in entries.items():
            entry = dict(given)
            models[name] = entry.pop("path", None)
            configs[name] = shared.updated(entry).updated(flags or {}).engine_config()
        return cls(**fields, models=models, configs=configs)


def read(file: str | Path) -> dict[str, Any]:
    """The fields of a file. Raises ConfigError if it cannot be read or is no TOML."""
    try:
        return tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {str(file)!r}: {error}") from error
