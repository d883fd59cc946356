"""`serve`: models over HTTP."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from pyllama_raw.cli.flags import add, add_fields, add_switch, sampling
from pyllama_raw.cli.info import show
from pyllama_raw.cli.options import (
    FIT_CTX,
    MODEL_HELP,
    add_engine,
    given,
    given_parts,
    profile_of,
)
from pyllama_raw.cli.running import Terminal, run
from pyllama_raw.errors import ConfigError
from pyllama_raw.options.chat_templates import AUTO
from pyllama_raw.options.config import EngineConfig, MediaConfig
from pyllama_raw.serve.config import (
    FILE_ONLY,
    ListenConfig,
    ModelsConfig,
    ServeConfig,
)
from pyllama_raw.serve.deployment import Deployment, read
from pyllama_raw.serve.keys import Keys
from pyllama_raw.serve.run import deploy

DEFAULT = "default"  # the name of the default model
LINE_S = 1.0  # between two lines of a model that loads


def add_serve(parser: ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help=MODEL_HELP)
    text = "the name of a MODEL, in their order; repeatable (the name of its file)"
    add(parser, "--alias", str, "NAME", text, action="append")
    text = "models and options as TOML (docs/service.md); flags win"
    add(parser, "--config", str, "FILE", text)
    text = "show each model and the limits that its engine would have, and end"
    add_switch(parser, "--dry-run", text)
    group = parser.add_argument_group("address")
    add_fields(group, ListenConfig, tuple(ListenConfig.model_fields))
    group = parser.add_argument_group("service")
    names = [name for name in ServeConfig.model_fields if name not in FILE_ONLY]
    add_fields(group, ServeConfig, names)
    text = (
        "a default of requests that do not say, such as temperature=0.2 or top_k=40: any field of "
        "SamplingParams, the value as JSON or text; repeatable"
    )
    add(group, "--sampling", sampling, "NAME=VALUE", text, action="append")
    add_fields(group, EngineConfig, ("warm_up",))
    group = parser.add_argument_group("models on demand")
    names = [name for name in ModelsConfig.model_fields if name != "memory"]
    add_fields(group, ModelsConfig, names)
    add_fields(parser.add_argument_group("media"), MediaConfig, ("mmproj",))
    add_engine(parser)


def serve(options: Namespace) -> int:
    """Run the command; return its exit status."""
    deployment = deployment_of(options)
    Keys(
        deployment.service
    )  # raises what would end the service, before a model is loaded
    if options.dry_run:
        paths, configs = deployment.models, deployment.configs
        return max(show(paths[n], configs[n], as_json=False) for n in paths)
    terminal = Terminal(sys.stdout, sys.stderr)

    loading = LoadingLines(terminal, deployment.models)
    has_uvloop = find_spec("uvloop") is not None  # not on Windows
    reread = None
    if options.config is not None or deployment.loading.models_dir is not None:
        reread = partial(deployment_of, options)
    serving = partial(deploy, deployment, loading, terminal.say, reread=reread)
    run(serving, use_uvloop=has_uvloop)
    return 0


class LoadingLines:
    """
    Tells how far models are: a screen what it has now, a log a line now and then.

    Programs that start a server wait longer as long as it says something.
    """

    def __init__(self, terminal: Terminal, models: Mapping[str, str | None]) -> None:
        self._terminal, self._models = terminal, models
        self._model: str | None = None
        self._told_s = 0.0

    def __call__(self, name: str, fraction: float) -> None:
        """Called in a worker thread with the *fraction* of the model *name* that is loaded."""
        now = monotonic()
        if name != self._model:
            self._model, self._told_s = name, now
            path = self._models.get(name) or "the default model"
            self._terminal.say(f"loading {name}: {path}")
        elif not self._terminal.has_status and now - self._told_s >= LINE_S:
            self._told_s = now
            self._terminal.say(f"loading {name}: {fraction:.0%}")
        self._terminal.status(f"{name}: {fraction:.0%} loaded")


def deployment_of(options: Namespace) -> Deployment:
    """
    The file, with the flags in place of what it says.

    Raises:
        ConfigError: names the flag or the field.
    """
    fields = read(options.config) if options.config is not None else {}
    fields |= given(options, ListenConfig.model_fields)
    service = given(options, ServeConfig.model_fields)
    if options.sampling:
        defaults = fields.get("service", {}).get("defaults", {})
        service["defaults"] = defaults | dict(options.sampling)
    fields["service"] = fields.get("service", {}) | service
    fields["engine"] = {"fit_ctx": FIT_CTX} | fields.get("engine", {})
    fields["model"] = {"chat_template": AUTO} | fields.get("model", {})
    loading = given(options, ModelsConfig.model_fields)
    if loading:
        fields["loading"] = fields.get("loading", {}) | loading
    profile = profile_of(options)
    has_folder = "models_dir" in fields.get("loading", {})
    if has_folder and not options.models:
        fields.setdefault("models", {})
    if options.models or "models" not in fields:
        fields["models"] = _named(options.models or [profile.path], options.alias)
    elif options.alias:
        raise ConfigError("--alias names a MODEL: the file names its models itself")
    flags = given_parts(options)
    flags["engine"] |= given(options, ("warm_up",))
    settings = profile.settings.updated(flags)
    return Deployment.of(fields, settings.model_dump())


def _named(
    files: Sequence[str | Path | None], alias: Sequence[str] | None
) -> dict[str, Any]:
    """The models that were given, by name; None is the default model."""
    names = alias or [DEFAULT if file is None else Path(file).stem for file in files]
    if len(names) != len(files) or len({*names}) != len(names):
        counts = f"{len(names)} names for {len(files)} models"
        raise ConfigError(f"{counts}: give each MODEL an --alias of its own")
    paths = [None if file is None else str(file) for file in files]
    return {name: {"path": path} for name, path in zip(names, paths, strict=True)}
