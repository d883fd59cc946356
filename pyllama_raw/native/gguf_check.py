"""
Model files that libllama would end the process with, refused before it opens them.

libllama computes with any type that a tensor names: one that has no product is a call of
a null pointer at the first decode. Shapes it compares with the metadata itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from pyllama_raw.errors import ModelLoadFailed
from pyllama_raw.native.gguf_header import (
    MAX_NAME,
    NO_OVERRIDES,
    DamagedFile,
    Header,
    Scalar,
    TensorInfo,
    read_header,
)
from pyllama_raw.native.libllama import lib, text

_INT64_MAX = 2**63 - 1
_FLOATS = ("F32", "F16", "BF16")
_INTEGERS = ("I32", "I64")  # of tables that rows are looked up in
# Weights are multiplied with rows of these; no weight has one.
_OF_ROWS = ("Q8_1", "Q8_K")
_TABLES = re.compile(r"tid2eid|d2t|token_ordering|masked_embd")
# Tensors of a layer that a graph reads without a look whether they are there: architectures,
# a tensor of such a layer, those it needs, and one that stands for them.
_GATED = ("attn_qkv.weight", "attn_gate.weight")
_NEEDS: tuple[tuple[tuple[str, ...], str, tuple[str, ...], str], ...] = (
    (("falcon-h1", "granitehybrid"), "ssm_conv1d.weight", ("ssm_conv1d.bias",), ""),
    (("nemotron_h", "nemotron_h_moe"), "ssm_conv1d.weight", ("ssm_conv1d.bias",), ""),
    (("qwen35", "qwen35moe"), "ssm_conv1d.weight", _GATED, ""),
    (("qwen3next",), "ssm_conv1d.weight", _GATED, "ssm_in.weight"),
)
# Integers of an architecture that libllama divides by as they are; a file may leave them out.
_DIVISORS = (
    "experts_per_group",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "wkv.head_size",
)
_WINDOW = "attention.sliding_window"  # the graphs of _WINDOWED always have one
_WINDOWED = ("afmoe",)
_MAY_BE_ZERO = (("plamo2", "ssm.group_count"), ("llama4", "interleave_moe_layer_step"))
_SPLIT = re.compile(r"(?s)(.*)-\d{5}-of-(\d{5})\.gguf")


def check_gguf(path: str, overrides: Mapping[str, Scalar] = NO_OVERRIDES) -> Header:
    """
    The header of *path* with *overrides*, as libllama takes it, and all tensors of its model.

    Raises:
        ModelLoadFailed: it, or that of a file that continues it, is not in order.
    """
    header = read_header(path).overridden(overrides)
    with _of(path):
        _check_divisors(header.values)
        check_tensors(header)
        _check_missing(header)
    for name in _continued(path, header.values):
        part = read_header(name)
        with _of(name):
            check_tensors(part)
        header = replace(header, tensors=header.tensors + part.tensors)
    return header


@contextmanager
def _of(path: str) -> Iterator[None]:
    try:
        yield
    except DamagedFile as error:
        raise ModelLoadFailed(path, str(error)) from None


def _continued(path: str, values: Mapping[str, Scalar]) -> Iterator[str]:
    """The other files of a model that is divided, of which *path* is the first."""
    count = values.get("split.count", 1)
    match = _SPLIT.fullmatch(path)
    if match is None or not isinstance(count, int) or int(match[2]) != count:
        return  # libllama says what is wrong
    for index in range(2, count + 1):
        yield f"{match[1]}-{index:05}-of-{count:05}.gguf"


def _check_divisors(values: Mapping[str, Scalar]) -> None:
    arch = str(values.get("general.architecture", ""))
    for name in _DIVISORS:
        value = values.get(f"{arch}.{name}", 1)
        if value == 0 and (arch, name) not in _MAY_BE_ZERO:
            raise DamagedFile(
                f"{arch}.{name}=0 is not allowed: the file, or kv_overrides, must give 1 or more"
            )
    if arch in _WINDOWED and not values.get(f"{arch}.{_WINDOW}"):
        raise DamagedFile(
            f"{arch}.{_WINDOW} is not stated: the file, or kv_overrides, must give 1 or more"
        )


def check_tensors(header: Header) -> None:
    """Names, types, dimensions and places; raises DamagedFile."""
    names: set[str] = set()
    offset = 0
    for tensor in header.tensors:
        name = tensor.name
        if not name or len(name.encode()) > MAX_NAME or name in names:
            raise DamagedFile(
                f"a tensor is named {name!r}: names are 1 to {MAX_NAME} bytes, each once"
            )
        names.add(name)
        size = n_bytes(tensor)
        if tensor.offset != offset:
            raise DamagedFile(f"tensor {name!r} is at {tensor.offset}, not at {offset}")
        if offset + size > header.n_left:
            raise DamagedFile(
                f"the file is cut off: tensor {name!r} takes {size} bytes from "
                f"{offset} on, of {max(header.n_left, 0)}"
            )
        offset += -(-size // header.alignment) * header.alignment


class _Type(NamedTuple):
    """What libllama says of a ggml_type."""

    name: str
    n_block: int  # values in a block; 0: there is no such type
    block_bytes: int


@cache
def _type(kind: int) -> _Type:
    if kind >= lib.GGML_TYPE_COUNT:
        return _Type("", 0, 0)
    name = text(lib.ggml_type_name(kind)).upper()
    return _Type(name, int(lib.ggml_blck_size(kind)), int(lib.ggml_type_size(kind)))


@cache
def is_weight_type(kind: int) -> bool:
    """Whether every backend can multiply with rows of the ggml_type *kind*."""
    name = _type(kind).name
    return name in _FLOATS or (
        bool(lib.ggml_is_quantized(kind)) and name not in _OF_ROWS
    )


def n_bytes(tensor: TensorInfo) -> int:
    """Size of the data of *tensor*, whose type and dimensions are in order."""
    kind, dims = tensor.type, tensor.dims
    name, n_block, block_bytes = _type(kind)
    if not n_block:
        raise DamagedFile(
            f"tensor {tensor.name!r} has the type {kind}, which there is not"
        )
    if not (
        is_weight_type(kind) or (name in _INTEGERS and _TABLES.search(tensor.name))
    ):
        raise DamagedFile(
            f"tensor {tensor.name!r} has the type {name}, which nothing computes with: "
            f"allowed are {', '.join(_FLOATS)} and the quantised types of weights"
        )
    n_values = math.prod(dims)
    if n_values < 1 or n_values > _INT64_MAX or dims[0] % n_block:
        raise DamagedFile(
            f"tensor {tensor.name!r} of type {name} has the dimensions {list(dims)}: each "
            f"must be 1 or more, the first one a multiple of {n_block}"
        )
    return n_values // n_block * block_bytes


def _check_missing(header: Header) -> None:
    arch = header.values.get("general.architecture")
    names = {tensor.name for tensor in header.tensors}
    for architectures, given, needed, instead in _NEEDS:
        if arch not in architectures:
            continue
        for name in names:
            layer = name.removesuffix(given)
            if layer == name or (instead and layer + instead in names):
                continue
            for other in needed:
                if layer + other not in names:
                    raise DamagedFile(f"tensor {layer + other!r} is missing")
