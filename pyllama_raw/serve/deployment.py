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

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from pyllama_raw import EngineConfig
from pyllama_raw.errors import ConfigError, shown
from pyllama_raw.options.frozen import Frozen, places, suggestion
from pyllama_raw.options.profile import Settings
from pyllama_raw.serve.config import ListenConfig, ServeConfig

OPTIONS = tuple(Settings.model_fields)  # parts of an EngineConfig
LOGS = ("step_log", "request_log")
MAX_DEPTH = 100  # of a file; its reader recurses


class AdapterEntry(Frozen):
    """An adapter that is loaded with its model; `[[models.assistant.adapters]]` in a file."""

    name: str
    """The name that requests give."""
    path: str
    """A GGUF file."""
    scale: float = 1.0
    """The scale of its effect on requests that name no adapters; 0: none."""


class Deployment(ListenConfig):
    """Models by the names that clients use, and where they are served."""

    service: ServeConfig = ServeConfig()
    """Options of the service."""
    models: dict[str, str | None] = Field(default_factory=dict)
    """Files by name. None: the default model."""
    configs: dict[str, EngineConfig] = Field(default_factory=dict)
    """Options of the engines, by name."""
    adapters: dict[str, tuple[AdapterEntry, ...]] = Field(default_factory=dict)
    """Adapters of the engines, by name."""

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
        models, settings, adapters = {}, {}, {}
        for name, fields_of_model in _table("models", entries).items():
            entry = dict(_table(f"models.{name}", fields_of_model))
            models[name] = entry.pop("path", None)
            if files := entry.pop("adapters", ()):
                adapters[name] = files
            _check_parts(name, entry)
            settings[name] = shared.updated(entry).updated(flags or {})
        configs = {
            name: model_settings.updated(
                _own_logs(name, model_settings, settings)
            ).engine_config()
            for name, model_settings in settings.items()
        }
        return cls(**fields, models=models, configs=configs, adapters=adapters)


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        example = "such as [models.assistant] with a path"
        raise ConfigError(f"{name}={shown(value)}: give a table, {example}")
    return value


def _check_parts(name: str, entry: Mapping[str, Any]) -> None:
    """Raise ConfigError if the *entry* of a model has more than a path and parts of options."""
    for part, fields in entry.items():
        if part not in OPTIONS:
            allowed = f"path, or a table of options: {', '.join(OPTIONS)}"
            hint = suggestion(part, places(EngineConfig)).replace(
                "did you mean ", f"did you mean models.{name}."
            )
            raise ConfigError(f"models.{name}.{part}: give {allowed}{hint}")
        _table(f"models.{name}.{part}", fields)


def _own_logs(
    name: str, mine: Settings, all_settings: Mapping[str, Settings]
) -> dict[str, Any]:
    """
    Logs of the model *name*, whose files no other model writes.

    A file that several models are given becomes one for each, with the name of the model before
    the suffix: `requests.jsonl` is `requests.assistant.jsonl`.
    """
    logs: dict[str, str] = {}
    for kind in LOGS:
        file = mine.log.get(kind)
        users = [
            other for other in all_settings.values() if other.log.get(kind) == file
        ]
        if file is None or len(users) < 2:
            continue
        path, part = Path(file), re.sub(r"[^\w.-]", "-", name)
        is_there = os.path.exists(path)  # noqa: PTH110 - a text of any length
        if not is_there or path.is_file():  # a device takes the lines of all
            logs[kind] = str(path.with_name(f"{path.stem}.{part}{path.suffix}"))
    return {"log": logs} if logs else {}


def read(file: str | Path) -> dict[str, Any]:
    """The fields of a file. Raises ConfigError if it cannot be read or is no TOML."""
    try:
        return tomllib.loads(Path(file).read_text("utf-8"))
    except RecursionError:
        reason = f"it nests too deeply, at most {MAX_DEPTH} levels are sure to be read"
        raise ConfigError(f"config {str(file)!r}: {reason}: flatten it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {str(file)!r}: {error}") from error
