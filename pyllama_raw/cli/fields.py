"""
Flags that stand for a field of the options.

A flag has the name, the limits, the description and the default of its field. The tables
here say what differs.
"""

from __future__ import annotations

from argparse import BooleanOptionalAction, _ActionsContainer
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize

from pyllama_raw.cli.flags import byte_size, json_file, reader, text_file
from pyllama_raw.options.frozen import AnyPath, descriptions
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
    "deterministic": {"action": "store_const", "const": True},
    "host": {"metavar": "ADDRESS"},
    "uds": {"metavar": "PATH"},
    "pooling": {"choices": ("mean", "cls", "last")},
    "api_keys_file": {"metavar": "FILE"},
    "access_log": {"metavar": "FILE"},
    "media_path": {"metavar": "FOLDER"},
    "cors_origins": {"action": "append", "metavar": "ORIGIN"},
    "metrics_names": {"action": "append", "choices": ("vllm", "llamacpp")},
    "devices": {"action": "append", "metavar": "NAME"},
    "stop": {"action": "append", "metavar": "TEXT", "type": reader(Text)},
    "stages": {"type": _words, "metavar": "NAMES"},
    "grammar": {"type": text_file, "metavar": "FILE"},
    "lark": {"type": text_file, "metavar": "FILE"},
    "json_schema": {"type": json_file, "metavar": "FILE"},
    "regex": {"type": reader(Text), "metavar": "PATTERN"},
}
MORE = {  # what belongs to the flag only
    "devices": "Repeatable.",
    "stop": "Repeatable.",
    "cors_origins": "Repeatable.",
    "metrics_names": "Repeatable.",
    "logprobs": "Shown with --jsonl.",
    "prompt_logprobs": "Shown with --jsonl.",
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
            help=_help(model, name, default),
            **HOW.get(name) or _how(model, name),
        )


def _how(model: type[BaseModel], name: str) -> dict[str, Any]:
    """Arguments with which argparse reads the field *name*, by its type."""
    field = model.model_fields[name]
    if name.endswith("_bytes"):
        return {"type": byte_size, "metavar": "SIZE"}
    if field.annotation is bool and field.default:
        return {"action": BooleanOptionalAction}
    if field.annotation is bool:
        return {"action": "store_const", "const": True}
    if get_origin(field.annotation) is Literal:
        choices = get_args(field.annotation)
        return {"choices": choices, "type": type(choices[0])}
    metavar = "S" if name.endswith("_s") else "N"
    if AnyPath in get_args(field.annotation):
        metavar = "FILE"
    return {"type": reader(field.rebuild_annotation()), "metavar": metavar}


def _help(model: type[BaseModel], name: str, default: Any) -> str:
    """The description of a field, and its default; that of None is in the description."""
    if default is None:
        default = model.model_fields[name].default
    text = f"{descriptions(model).get(name, name)} {MORE.get(name, '')}".strip()
    value = _shown(name, default)
    return f"{text} ({value})".replace("%", "%%") if value else text


def _shown(name: str, value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    if isinstance(value, tuple):
        return ", ".join(value)
    if name.endswith("_bytes"):
        return ByteSize(value).human_readable(separator=" ")
    return "yes" if value is True else f"{value}"
