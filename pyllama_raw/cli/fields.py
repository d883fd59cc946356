"""
Flags that stand for a field of the options.

A flag has the name, the limits, the description and the default of its field. The tables
here say what differs.
"""

from __future__ import annotations

from argparse import BooleanOptionalAction, _ActionsContainer
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from pyllama_raw.cli.flag_help import help_of
from pyllama_raw.cli.flags import byte_size, json_file, reader, text_file
from pyllama_raw.options.sampling import Text

NAMES = {
    "n_slots": "--slots",
    "n_threads": "--threads",
    "n_threads_batch": "--threads-batch",
    "devices": "--device",
    "n_gpu_layers": "--gpu-layers",
    "mode": "--cache",
    "snapshot_interval_tokens": "--snapshot-interval",
    "max_bytes": "--cache-bytes",
    "max_entries": "--cache-entries",
    "directory": "--cache-dir",
    "max_disk_bytes": "--cache-disk-bytes",
    "from_model": "--model-sampling",
    "stages": "--samplers",
    "grammar": "--grammar-file",
    "json_schema": "--json-schema-file",
    "lark": "--lark-file",
}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


HOW: dict[str, dict[str, Any]] = {  # arguments of argparse
    "policy": {"metavar": "NAME"},
    "devices": {"action": "append", "metavar": "NAME"},
    "stop": {"action": "append", "metavar": "TEXT", "type": reader(Text)},
    "directory": {"type": Path, "metavar": "DIR"},
    "mmproj": {"metavar": "FILE"},
    "step_log": {"type": Path, "metavar": "FILE"},
    "request_log": {"type": Path, "metavar": "FILE"},
    "max_bytes": {"type": byte_size, "metavar": "SIZE"},
    "max_disk_bytes": {"type": byte_size, "metavar": "SIZE"},
    "stages": {"type": _words, "metavar": "NAMES"},
    "grammar": {"type": text_file, "metavar": "FILE"},
    "lark": {"type": text_file, "metavar": "FILE"},
    "json_schema": {"type": json_file, "metavar": "FILE"},
    "regex": {"type": reader(Text), "metavar": "PATTERN"},
}
MORE = {  # what belongs to the flag only
    "devices": "repeatable",
    "stop": "repeatable",
    "logprobs": "shown with --jsonl",
    "prompt_logprobs": "shown with --jsonl",
}


def add_fields(
    group: _ActionsContainer,
    model: type[BaseModel],
    names: Iterable[str],
    **defaults: Any,
) -> None:
    """Add the flags of *names*, fields of *model*; a command may have other defaults."""
    for name in names:
        default = defaults.get(name)
        group.add_argument(
            NAMES.get(name, f"--{name.replace('_', '-')}"),
            dest=name,
            default=default,
            help=help_of(model, name, default, more=MORE.get(name, "")),
            **HOW.get(name) or _how(model, name),
        )


def _how(model: type[BaseModel], name: str) -> dict[str, Any]:
    """How argparse reads the field *name*, by its type."""
    field = model.model_fields[name]
    if field.annotation is bool and field.default:
        return {"action": BooleanOptionalAction}
    if field.annotation is bool:
        return {"action": "store_const", "const": True}
    if get_origin(field.annotation) is Literal:
        choices = get_args(field.annotation)
        return {"choices": choices, "type": type(choices[0])}
    metavar = "S" if name.endswith("_s") else "N"
    return {"type": reader(field.rebuild_annotation()), "metavar": metavar}
