"""
Flags that stand for a field of the options, and flags of their own.

A flag of a field has the name, the limits, the description and the default of its field. The tables
here say what differs. What a flag allows is told in the words that the options have for it
(frozen.py).
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError, BooleanOptionalAction, _ActionsContainer
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ByteSize, Field, TypeAdapter, ValidationError

from pyllama_raw.options.config import Count, Finite
from pyllama_raw.options.frozen import AnyPath, allowed, descriptions, suggestion
from pyllama_raw.options.requests import MAX_SCALE
from pyllama_raw.options.sampling import SamplingParams, Text

SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
Reader = Callable[[str], Any]


def add(
    group: _ActionsContainer,
    flag: str,
    read: Reader,
    metavar: str,
    text: str,
    *,
    default: object = None,
    **options: Any,
) -> None:
    """Add a flag with a value; its help ends with the default."""
    help_text = text if default is None else f"{text} ({default})"
    group.add_argument(
        flag, type=read, metavar=metavar, default=default, help=help_text, **options
    )


def add_switch(group: _ActionsContainer, flag: str, text: str) -> None:
    """Add a flag without a value."""
    group.add_argument(flag, action="store_true", help=text)


def reader(kind: Any) -> Reader:
    """A reader of a flag as a value of *kind*, a type with pydantic's limits."""
    adapter = cache(lambda: TypeAdapter[Any](kind))  # takes a while: made if it is used

    def read(text: str) -> Any:
        try:
            return adapter().validate_python(text)
        except ValidationError as error:
            words, value = allowed(error.errors()[0]), text or "''"
            raise ArgumentTypeError(f"{value}: give {words}") from None

    return read


count = reader(Count)
whole_number = reader(Annotated[int, Field(ge=0)])
positive = reader(Annotated[Finite, Field(gt=0)])
not_negative = reader(Annotated[Finite, Field(ge=0)])
share = reader(Annotated[Finite, Field(ge=0, le=1)])
_scale = reader(Annotated[Finite, Field(ge=-MAX_SCALE, le=MAX_SCALE)])


class AdapterFlag(NamedTuple):
    """The adapter that one flag names."""

    name: str
    path: str
    scale: float


def adapter(text: str) -> AdapterFlag:
    """An adapter, with the scale of its effect."""
    match = re.fullmatch(r"([^=]+)=(.+?)(?::([-+]?[\d.]+))?", text)
    if match is None:
        raise ArgumentTypeError(f"{text}: give NAME=FILE or NAME=FILE:SCALE")
    return AdapterFlag(match[1], match[2], _scale(match[3] or "1"))


def scales_of(adapters: Iterable[AdapterFlag]) -> dict[str, float]:
    """Scales of adapters, by name."""
    return {name: scale for name, _, scale in adapters}


def sampling(text: str) -> tuple[str, Any]:
    """A field of SamplingParams and its value."""
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    is_known = name in SamplingParams.model_fields
    if not equals or not is_known:
        close = "" if is_known else suggestion(name, SamplingParams.model_fields)
        words = f"give NAME=VALUE with a field of SamplingParams{close}"
        raise ArgumentTypeError(f"{text}: {words}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def byte_size(text: str) -> int:
    """Bytes of a size like 48M or 1.5GiB."""
    match = re.fullmatch(r"([0-9.]+) *([kmgt]?)(i?b)?", text.strip().lower())
    try:
        if match is not None:
            return int(float(match[1]) * SIZES[match[2]])
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text}: give bytes, or a size like 512M or 2G")


def text_file(name: str) -> str:
    """The text in a file."""
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentTypeError(f"{name}: cannot be read: {reason}") from None


def json_file(name: str) -> Any:
    """The JSON value in a file."""
    try:
        return json.loads(text_file(name))
    except ValueError as error:
        raise ArgumentTypeError(f"{name}: no JSON: {error}") from None


# -- fields ---------------------------------------------------------------------

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
    "in_place_of": {"choices": ("llama-server",)},
    "pooling": {"choices": ("mean", "cls", "last")},
    "api_keys_file": {"metavar": "FILE"},
    "access_log": {"metavar": "FILE"},
    "media_path": {"metavar": "FOLDER"},
    "models_dir": {"metavar": "FOLDER"},
    "slot_save_path": {"metavar": "FOLDER"},
    "on_demand": {"action": BooleanOptionalAction},
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
    # argparse formats the text once more.
    return (f"{text} ({value})" if value else text).replace("%", "%%")


def _shown(name: str, value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    if isinstance(value, tuple):
        return ", ".join(value)
    if name.endswith("_bytes"):
        return ByteSize(value).human_readable(separator=" ")
    return "yes" if value is True else f"{value}"
