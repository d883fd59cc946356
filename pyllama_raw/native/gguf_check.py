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
from pathlib import Path
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
from pyllama_raw.native.gguf_rules import check_rules
from pyllama_raw.native.libllama import lib, text
from pyllama_raw.native.split_files import split_names

_INT64_MAX = 2**63 - 1
_FLOATS = ("F32", "F16", "BF16")
_INTEGERS = ("I32", "I64")  # of tables that rows are looked up in
# Weights are multiplied with rows of these; no weight has one.
_OF_ROWS = ("Q8_1", "Q8_K")
_TABLES = re.compile(r"tid2eid|d2t|token_ordering|masked_embd")


def check_gguf(path: str, overrides: Mapping[str, Scalar] = NO_OVERRIDES) -> Header:
    """
    The header of *path* with *overrides*, as libllama takes it, and all tensors of its model.

    Raises:
        ModelLoadFailed: it, or that of a file that continues it, is not in order.
    """
    header = read_header(path).overridden(overrides)
    with _of(path):
        check_tensors(header)
    names = split_names(path)
    if len(names) != header.values.get("split.count"):
        names = []  # libllama says what is wrong, if something is
    missing = [name for name in names if not Path(name).exists()]
    if missing:
        message = f"no such file; of the {len(names)} files of this model are missing: "
        raise ModelLoadFailed(
            missing[0], message + ", ".join(Path(n).name for n in missing)
        )
    for name in names[1:]:
        part = read_header(name)
        with _of(name):
            check_tensors(part)
        header = replace(header, tensors=header.tensors + part.tensors)
    with _of(path):
        check_rules(header)
    return header


@contextmanager
def _of(path: str) -> Iterator[None]:
    try:
        yield
    except DamagedFile as error:
        raise ModelLoadFailed(path, str(error)) from None


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
    """Facts that libllama tells of a ggml_type."""

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
