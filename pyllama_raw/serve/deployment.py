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

With a table `[loading]`, or a folder of models, models are loaded when they are asked for.
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
from pyllama_raw.errors import ConfigError, reason_of, shown
from pyllama_raw.options.frozen import Frozen, places, suggestion
from pyllama_raw.options.profile import Settings
from pyllama_raw.options.requests import AdapterScale
from pyllama_raw.serve.config import (
    IdleSeconds,
    ListenConfig,
    ModelsConfig,
    ServeConfig,
)

OPTIONS = tuple(Settings.model_fields)  # parts of an EngineConfig
LOGS = ("step_log", "request_log")
PARTS = "-00001-of-"  # in the name of the first file of a model in parts
MAX_DEPTH = 100  # of a file; its reader recurses


class AdapterEntry(Frozen):
    """An adapter that is loaded with its model; `[[models.assistant.adapters]]` in a file."""

    name: str
    """The name that requests give."""
    path: str
    """A GGUF file."""
    scale: AdapterScale = 1.0
    """The scale of its effect on requests that name no adapters; 0: none."""


class ModelPlace(Frozen):
    """The place of a model in memory, where models are loaded on demand; keys of its table."""

    pinned: bool = False
    """It stays loaded: it gives way to nobody, and does not rest by itself."""
    load_on_start: bool = False
    """It is loaded at the start."""
    sleep_idle_s: IdleSeconds | None = None
    """`loading.sleep_idle_s` of this model. 0: at once; below 0: never; None: as all models."""
    unload_idle_s: IdleSeconds | None = None
    """`loading.unload_idle_s` of this model. 0: at once; below 0: never; None: as all models."""


PLACE = tuple(ModelPlace.model_fields)


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
    loading: ModelsConfig = ModelsConfig()
    """When models are loaded, and what gives way."""
    places: dict[str, ModelPlace] = Field(default_factory=dict)
    """Places of models, by name, as far as they say something of it."""
    sources: dict[str, str] = Field(default_factory=dict)
    """The lists that have models, by name, as llama-server's router calls them."""

    @property
    def is_on_demand(self) -> bool:
        """Whether models are loaded when they are asked for."""
        if self.loading.on_demand is not None:
            return self.loading.on_demand
        return bool(self.places) or self.loading != ModelsConfig()

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
        loading = ModelsConfig(**_table("loading", fields.pop("loading", {})))
        entries = fields.pop("models", None)
        if entries is None and loading.models_dir is None:
            entries = {"default": {}}
        entries = dict(_table("models", entries or {}))
        # A table of the file may say more of a model of the folder.
        if loading.models_dir is not None:
            for name, files in models_of(loading.models_dir).items():
                entries[name] = _joined(files, entries.get(name, {}))
        models, settings, adapters, places = {}, {}, {}, {}
        for name, fields_of_model in entries.items():
            entry = dict(_table(f"models.{name}", fields_of_model))
            models[name] = entry.pop("path", None)
            if files := entry.pop("adapters", ()):
                adapters[name] = files
            if place := {n: entry.pop(n) for n in PLACE if n in entry}:
                places[name] = place
            _check_parts(name, entry)
            try:
                settings[name] = shared.updated(entry).updated(flags or {})
            except ConfigError as error:
                raise _of_model(name, error) from None
        configs = {
            name: model_settings.updated(
                _own_logs(name, model_settings, settings)
            ).engine_config()
            for name, model_settings in settings.items()
        }
        parts: dict[str, Any] = {"models": models, "configs": configs}
        parts |= {"adapters": adapters, "loading": loading, "places": places}
        return cls(**fields, **parts)


def models_of(folder: str) -> dict[str, dict[str, Any]]:
    """
    The entries of the models in *folder*, by name, as llama-server finds them.

    Files whose paths are no text have no names that requests could give, and are left out.

    Raises:
        ConfigError: there is no such folder.
    """
    try:
        places = sorted(Path(folder).expanduser().iterdir())
        lists = [sorted(p.iterdir()) if p.is_dir() else [p] for p in places]
    except (OSError, RuntimeError) as error:
        reason = reason_of(error)
        raise ConfigError(f"models_dir {folder!r}: {reason}") from error
    models = {}
    for place, paths in zip(places, lists, strict=True):
        files = [p for p in paths if p.suffix == ".gguf" and _is_text(str(p))]
        projectors = [path for path in files if "mmproj" in path.name]
        weights = [p for p in files if "mmproj" not in p.name and "draft" not in p.name]
        # A model in parts is opened by its first one.
        weights.sort(key=lambda path: (PARTS not in path.name, path.name))
        if not weights:
            continue
        entry: dict[str, Any] = {"path": str(weights[0])}
        if place.is_dir() and projectors:
            entry["media"] = {"mmproj": str(projectors[0])}
        models[place.name if place.is_dir() else place.stem] = entry
    return models


def _is_text(path: str) -> bool:
    """Whether *path* is in UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _joined(files: dict[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a model of a folder, with what its table says, which wins."""
    media = {**files.get("media", {}), **entry.get("media", {})}
    return {**files, **entry, **({"media": media} if media else {})}


def _of_model(name: str, error: ConfigError) -> ConfigError:
    """*error* with the table of the model *name* in its places."""
    mistakes = tuple(
        (f"models.{name}.{option}", value, words)
        for option, value, words in error.mistakes
    )
    return ConfigError(f"models.{name}: {error}", mistakes)


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        example = "such as [models.assistant] with a path"
        raise ConfigError(f"{name}={shown(value)}: give a table, {example}")
    return value


def _check_parts(name: str, entry: Mapping[str, Any]) -> None:
    """Raise ConfigError if the *entry* of a model has more than a path and parts of options."""
    for part, fields in entry.items():
        if part not in OPTIONS:
            allowed = (
                f"path, {', '.join(PLACE)}, or a table of options: {', '.join(OPTIONS)}"
            )
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
        reason = reason_of(error)
        raise ConfigError(f"config {str(file)!r}: {reason}") from error
