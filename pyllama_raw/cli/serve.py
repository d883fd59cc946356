"""`serve`: models over HTTP."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyllama_raw.cli.engine_options import FIT_CTX, given, given_parts, profile_of
from pyllama_raw.cli.groups import run
from pyllama_raw.cli.info import show
from pyllama_raw.cli.terminal import Terminal
from pyllama_raw.errors import ConfigError
from pyllama_raw.serve.config import ListenConfig, ServeConfig
from pyllama_raw.serve.deployment import Deployment, read
from pyllama_raw.serve.run import deploy


def serve(options: Namespace) -> int:
    """Run the command; return its exit status."""
    deployment = deployment_of(options)
    if options.dry_run:
        paths, configs = deployment.models, deployment.configs
        return max(show(paths[n], configs[n], as_json=False) for n in paths)
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
    fields["engine"] = {"fit_ctx": FIT_CTX} | fields.get("engine", {})
    profile = profile_of(options)
    if options.models:
        fields["models"] = _named(options)
    elif options.alias:
        raise ConfigError("--alias names a MODEL: give as many models")
    elif profile.path is not None and "models" not in fields:
        fields["models"] = {profile.path.stem: {"path": str(profile.path)}}
    settings = profile.settings.updated(given_parts(options))
    return Deployment.of(fields, settings.model_dump())


def _named(options: Namespace) -> dict[str, Any]:
    """The models that were given, by name."""
    names = options.alias or [Path(file).stem for file in options.models]
    if len(names) != len(options.models) or len({*names}) != len(names):
        told = f"{len(names)} names for {len(options.models)} models"
        raise ConfigError(f"{told}: give each MODEL an --alias of its own")
    return {n: {"path": file} for n, file in zip(names, options.models, strict=True)}
