"""Flags of the engine, and what they make; one not given leaves config.py's default."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pyllama_raw.cli.flag_help import help_of
from pyllama_raw.cli.flags import byte_size, field
from pyllama_raw.config import (
    CacheConfig,
    ContextConfig,
    EngineConfig,
    KVType,
    ModelConfig,
    SchedulerConfig,
)
from pyllama_raw.profile import Profile


def add_engine(
    parser: ArgumentParser, *, n_slots: int | None = None, n_ctx: int | None = None
) -> None:
    """Flags of everything that opens a model; a command may have other defaults."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--profile",
        metavar="FILE",
        help="options, and the model if none is named, as `tune` wrote them; "
        "other flags win",
    )
    group.add_argument(
        "--slots",
        dest="n_slots",
        type=field(SchedulerConfig, "n_slots"),
        default=n_slots,
        metavar="N",
        help=help_of(SchedulerConfig, "n_slots", n_slots),
    )
    group.add_argument(
        "--n-ctx",
        type=field(ContextConfig, "n_ctx"),
        default=n_ctx,
        metavar="N",
        help=help_of(ContextConfig, "n_ctx", n_ctx),
    )
    group.add_argument(
        "--token-budget",
        type=field(SchedulerConfig, "token_budget"),
        metavar="N",
        help=help_of(SchedulerConfig, "token_budget"),
    )
    group.add_argument(
        "--target-step-s",
        type=field(SchedulerConfig, "target_step_s"),
        metavar="S",
        help=help_of(SchedulerConfig, "target_step_s"),
    )
    group.add_argument(
        "--deterministic",
        action="store_const",
        const=True,
        help=help_of(EngineConfig, "deterministic").removesuffix(" (no)"),
    )
    group.add_argument(
        "--sampler-placement",
        choices=("auto", "backend", "host"),
        help=help_of(EngineConfig, "sampler_placement"),
    )
    group.add_argument(
        "--context-full",
        choices=("stop", "shift"),
        help=help_of(SchedulerConfig, "context_full"),
    )
    _add_context(group)
    _add_devices(parser)
    _add_cache(parser)


def _add_context(group: _ArgumentGroup) -> None:
    """Fields of the context."""
    for flag, name in (
        ("--threads", "n_threads"),
        ("--threads-batch", "n_threads_batch"),
        ("--n-batch", "n_batch"),
        ("--n-ubatch", "n_ubatch"),
    ):
        kind = field(ContextConfig, name)
        text = help_of(ContextConfig, name)
        group.add_argument(flag, dest=name, type=kind, metavar="N", help=text)
    group.add_argument(
        "--flash-attn",
        choices=("auto", "on", "off"),
        help=help_of(ContextConfig, "flash_attn"),
    )
    group.add_argument(
        "--kv-unified",
        action=BooleanOptionalAction,
        help=help_of(ContextConfig, "kv_unified"),
    )
    types = get_args(KVType)
    for name in ("type_k", "type_v"):
        text = help_of(ContextConfig, name, more=f"; one of {', '.join(types)}")
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, choices=types, metavar="TYPE", help=text)


def _add_devices(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--device",
        dest="devices",
        action="append",
        metavar="NAME",
        help=help_of(ModelConfig, "devices", more="; repeatable"),
    )
    group.add_argument(
        "--gpu-layers",
        dest="n_gpu_layers",
        type=field(ModelConfig, "n_gpu_layers"),
        metavar="N",
        help=help_of(ModelConfig, "n_gpu_layers"),
    )
    group.add_argument(
        "--split-mode",
        choices=get_args(ModelConfig.model_fields["split_mode"].annotation),
        help=help_of(ModelConfig, "split_mode"),
    )
    group.add_argument(
        "--main-gpu",
        type=field(ModelConfig, "main_gpu"),
        metavar="N",
        help=help_of(ModelConfig, "main_gpu"),
    )


def _add_cache(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("prefix cache")
    group.add_argument(
        "--cache",
        dest="mode",
        choices=("off", "live", "snapshots"),
        help=help_of(CacheConfig, "mode"),
    )
    group.add_argument(
        "--snapshot-interval",
        dest="snapshot_interval_tokens",
        type=field(CacheConfig, "snapshot_interval_tokens"),
        metavar="N",
        help=help_of(CacheConfig, "snapshot_interval_tokens"),
    )
    group.add_argument(
        "--cache-bytes",
        dest="max_bytes",
        type=byte_size,
        metavar="SIZE",
        help=help_of(CacheConfig, "max_bytes"),
    )
    group.add_argument(
        "--cache-entries",
        dest="max_entries",
        type=field(CacheConfig, "max_entries"),
        metavar="N",
        help=help_of(CacheConfig, "max_entries"),
    )
    group.add_argument(
        "--cache-dir",
        dest="directory",
        type=Path,
        metavar="DIR",
        help=help_of(CacheConfig, "directory"),
    )
    group.add_argument(
        "--cache-disk-bytes",
        dest="max_disk_bytes",
        type=byte_size,
        metavar="SIZE",
        help=help_of(CacheConfig, "max_disk_bytes"),
    )


def engine_config(options: Namespace) -> EngineConfig:
    """
    Raises:
        ConfigError: names the flag that is out of range.
    """
    return profile_of(options).engine_config(
        model=given(options, ModelConfig.model_fields),
        context=given(options, ContextConfig.model_fields),
        # The inputs are in memory already: only their number is limited.
        scheduler={"max_waiting_tokens": 2**40}
        | given(options, SchedulerConfig.model_fields),
        cache=given(options, CacheConfig.model_fields),
        engine=given(options, ("sampler_placement", "deterministic")),
    )


def profile_of(options: Namespace) -> Profile:
    """The one that was named, or one without any option."""
    return Profile() if options.profile is None else Profile.load(options.profile)


def model_spec(options: Namespace) -> str | Path | None:
    """The model that was named, or the profile's; None: the default one."""
    return options.model or profile_of(options).path


def given(options: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of *names* that were given."""
    values = vars(options)
    return {name: values[name] for name in names if values.get(name) is not None}
