"""Flags of the engine, and the configuration that they make."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pyllama_raw.cli.fields import add_fields
from pyllama_raw.cli.flags import add, whole_number
from pyllama_raw.errors import ConfigError
from pyllama_raw.options.chat_templates import AUTO
from pyllama_raw.options.config import (
    CacheConfig,
    ContextConfig,
    EmbeddingConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    SchedulerConfig,
)
from pyllama_raw.options.frozen import descriptions
from pyllama_raw.options.profile import Profile, Settings

ENGINE: tuple[tuple[type[BaseModel], tuple[str, ...]], ...] = (
    (SchedulerConfig, ("n_slots", "token_budget", "target_step_s", "context_full")),
    (SchedulerConfig, ("policy", "budget_mode")),
    (EngineConfig, ("deterministic", "sampler_placement")),
    (ContextConfig, ("n_ctx", "n_threads", "n_threads_batch", "n_batch", "n_ubatch")),
    (ContextConfig, ("flash_attn", "kv_unified", "type_k", "type_v")),
)
DEVICES = ("devices", "n_gpu_layers", "split_mode", "main_gpu")
CACHE = (
    *("mode", "snapshot_interval_tokens", "max_bytes", "max_entries", "directory"),
    "max_disk_bytes",
)
FIT_CTX = 4096  # fit_ctx of commands, where nobody says
LOGS = ("step_log", "request_log")


def add_engine(parser: ArgumentParser, **defaults: int) -> None:
    """Flags of everything that opens a model; a command may have other defaults."""
    group = parser.add_argument_group("engine")
    text = (
        "options, and the model if none is named, as `tune` wrote them; other flags win"
    )
    add(group, "--profile", str, "FILE", text)
    for model, names in ENGINE:
        add_fields(group, model, names, **defaults)
    group.add_argument(
        "--deterministic-fast",
        dest="deterministic",
        action="store_const",
        const="fast",
        help="the fast way of it",
    )
    text = f"{descriptions(EngineConfig)['fit_ctx']} ({FIT_CTX})"
    add(group, "--fit-ctx", whole_number, "N", text)
    add_fields(parser.add_argument_group("devices"), ModelConfig, DEVICES)
    group = parser.add_argument_group("chats")
    text = "the chat template: a name such as chatml or hermes, a file, or Jinja text"
    add(
        group,
        "--chat-template",
        str,
        "TEMPLATE",
        f"{text} (the model's own, or chatml)",
    )
    add_fields(group, ModelConfig, ("template_process",))
    add_fields(parser.add_argument_group("prefix cache"), CacheConfig, CACHE)
    add_fields(parser.add_argument_group("logs"), LogConfig, LOGS)


def engine_config(options: Namespace) -> EngineConfig:
    """
    Raises:
        ConfigError: names the flag that is out of range.
    """
    parts = given_parts(options)
    # The inputs are in memory already: only their number is limited.
    parts["scheduler"] = {"max_waiting_tokens": 2**40} | parts["scheduler"]
    # The adapters are named one by one: there is nothing to give way.
    parts["engine"] = {"max_adapter_bytes": 2**60} | parts["engine"]
    settings = Settings(engine={"fit_ctx": FIT_CTX}, model={"chat_template": AUTO})
    settings = settings.updated(profile_of(options).settings.model_dump())
    return settings.updated(parts).engine_config()


def given_parts(options: Namespace) -> dict[str, dict[str, Any]]:
    """Options of engines that were given, by the parts of Settings."""
    of_parts: dict[str, Iterable[str]] = {
        "model": ModelConfig.model_fields,
        "context": ContextConfig.model_fields,
        "scheduler": SchedulerConfig.model_fields,
        "cache": CacheConfig.model_fields,
        "embedding": EmbeddingConfig.model_fields,
        "media": ("mmproj",),
        "log": LogConfig.model_fields,
        "engine": ("sampler_placement", "deterministic", "fit_ctx"),
    }
    return {part: given(options, names) for part, names in of_parts.items()}


def profile_of(options: Namespace) -> Profile:
    """The one that was named, or one without any option."""
    return Profile() if options.profile is None else Profile.load(options.profile)


def model_spec(options: Namespace) -> str | Path | None:
    """The model that was named, or the profile's; None: the default one."""
    return named_model(options) or profile_of(options).path


def named_model(options: Namespace) -> str | None:
    """
    The model that an argument or --model names; None: neither does.

    Raises:
        ConfigError: both do.
    """
    argument: str | None = getattr(options, "model_argument", None)
    if argument is not None and options.model is not None:
        given_twice = f"{argument!r} and --model {options.model!r}"
        raise ConfigError(f"{given_twice} are two models: give one of them")
    model: str | None = argument or options.model
    return model


def given(options: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Options among *names* that were given, with their values."""
    values = vars(options)
    return {name: values[name] for name in names if values.get(name) is not None}
