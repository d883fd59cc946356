"""`serve`: models over HTTP."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyllama_raw.cli.engine_options import given, profile_of
from pyllama_raw.cli.groups import run
from pyllama_raw.cli.info import info
from pyllama_raw.cli.terminal import Terminal
from pyllama_raw.errors import ConfigError
from pyllama_raw.options.config import (
    CacheConfig,
    ContextConfig,
    LogConfig,
    ModelConfig,
    SchedulerConfig,
)
from pyllama_raw.serve.config import ListenConfig, ServeConfig
from pyllama_raw.serve.deployment import Deployment, read
from pyllama_raw.serve.run import deploy


def serve(options: Namespace) -> int:
    """Run the command; return its exit status."""
    deployment = deployment_of(options)
    if options.dry_run:
        return max(_shown(options, path) for path in deployment.models.values())
    terminal = Terminal(sys.stdout, sys.stderr)

    def loading(name: str, fraction: float) -> None:
        terminal.status(f"{name}: {fraction:.0%} loaded")

    has_uvloop = find_spec("uvloop") is not None  # not on Windows
    run(partial(deploy, deployment, loading, terminal.say), use_uvloop=has_uvloop)
    return 0


def deployment_of(options: Namespace) -> Deployment:
    """
    The file, with the flags in place of what it says.

    Raises:
        ConfigError: names the flag or the field.
    """
    fields = read(options.config) if options.config is not None else {}
    fields |= given(options, ListenConfig.model_fields)
    service = given(options, ServeConfig.model_fields)
    fields["service"] = fields.get("service", {}) | service
    if options.models:
        fields["models"] = _named(options)
    elif options.alias:
        raise ConfigError("--alias names a MODEL: give as many models")
    return Deployment.of(fields, _flags(options))


def _named(options: Namespace) -> dict[str, Any]:
    """The models that were given, by name."""
    names = options.alias or [Path(file).stem for file in options.models]
    if len(names) != len(options.models) or len({*names}) != len(names):
        told = f"{len(names)} names for {len(options.models)} models"
        raise ConfigError(f"{told}: give each MODEL an --alias of its own")
    return {n: {"path": file} for n, file in zip(names, options.models, strict=True)}


def _flags(options: Namespace) -> dict[str, dict[str, Any]]:
    """Options of engines by part; those of a profile give way to flags."""
    parts = {
        "model": given(options, ModelConfig.model_fields),
        "context": given(options, ContextConfig.model_fields),
        "scheduler": given(options, SchedulerConfig.model_fields),
        "cache": given(options, CacheConfig.model_fields),
        "media": given(options, ("mmproj",)),
        "log": given(options, LogConfig.model_fields),
        "engine": given(options, ("sampler_placement", "deterministic")),
    }
    return profile_of(options).settings.updated(parts).model_dump()


def _shown(options: Namespace, path: str | None) -> int:
    """Facts of one model, as `info` tells them."""
    return info(Namespace(**vars(options) | {"model": path, "json": False}))
