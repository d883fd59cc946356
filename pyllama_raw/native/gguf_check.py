"""
Model files that libllama would end the process with, refused before it opens them.

libllama computes with any type that a tensor names: one that has no product is a call of
a null pointer at the first decode. Shapes it compares with the metadata itself. Of some
architectures it assumes more of the metadata and the tensors: those are rules, in tables.
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
    split_names,
)
from pyllama_raw.native.libllama import lib, text

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
    # A model may be divided: then tensors of all files are its tensors.
    names = split_names(path)
    if len(names) != header.values.get("split.count"):
        names = []  # libllama says what is wrong, if something is
    # All that are missing are named at once.
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
    # Rules are about the whole model, so they come last.
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
        # Tensors lie one behind the other, in the order of the table.
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
    # The type is a number of the file, of which ggml knows some.
    if not n_block:
        raise DamagedFile(
            f"tensor {tensor.name!r} has the type {kind}, which there is not"
        )
    # Integers have no product, so only tables may be of them.
    if not (
        is_weight_type(kind) or (name in _INTEGERS and _TABLES.search(tensor.name))
    ):
        raise DamagedFile(
            f"tensor {tensor.name!r} has the type {name}, which nothing computes with: "
            f"allowed are {', '.join(_FLOATS)} and the quantised types of weights"
        )
    # Rows are whole blocks of the type, and libllama counts values in 64 bits.
    n_values = math.prod(dims)
    if n_values < 1 or n_values > _INT64_MAX or dims[0] % n_block:
        raise DamagedFile(
            f"tensor {tensor.name!r} of type {name} has the dimensions {list(dims)}: each "
            f"must be 1 or more, the first one a multiple of {n_block}"
        )
    return n_values // n_block * block_bytes


class NotZero(NamedTuple):
    """An integer that has to be 1 or more."""

    key: str  # without the architecture
    architectures: tuple[str, ...]
    because: str
    unless: str = ""  # a key that is read in its place
    tensor: str = ""  # of a layer; without one the key may be 0
    default: int = 1  # what libllama takes where a file does not state it


class Needs(NamedTuple):
    """Tensors that a graph reads without a look whether they are there."""

    architectures: tuple[str, ...]
    tensor: str  # of such a layer
    needed: tuple[str, ...]  # of the same layer
    instead: str = ""  # a tensor that stands for them
    zero: str = ""  # a key; where it is 0 the graph does not read them


_MAMBA2 = ("falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe")
_DELTA_NET = ("qwen35", "qwen35moe", "qwen3next")
_RWKV = ("arwkv7", "rwkv6", "rwkv6qwen2", "rwkv7")
_KIMI = ("kimi-k3", "kimi-linear")
_COMPRESSED = "layers with attn_k_b.weight keep their keys compressed"
NOT_ZERO = (
    NotZero("attention.key_length_mla", _KIMI, _COMPRESSED, tensor="attn_k_b.weight"),
    NotZero("attention.value_length_mla", _KIMI, _COMPRESSED, tensor="attn_k_b.weight"),
    NotZero(
        "attention.output_group_count",
        ("deepseek4",),
        "the heads are divided into so many groups",
    ),
    NotZero(
        "experts_per_group", ("grovemoe",), "the experts are divided into such groups"
    ),
    NotZero(
        "full_attention_interval",
        ("minimax-01", *_DELTA_NET),
        "one layer of so many has full attention",
        unless="attention.recurrent_layers",
    ),
    NotZero(
        "interleave_moe_layer_step",
        ("ernie4_5-moe",),
        "one layer of so many has experts",
    ),
    NotZero(
        "ssm.group_count",
        (*_MAMBA2, *_DELTA_NET),
        "the state is divided into so many groups",
    ),
    NotZero("ssm.inner_size", _DELTA_NET, "the state would have no place"),
    NotZero(
        "ssm.time_step_rank",
        (*_MAMBA2, "plamo2", *_DELTA_NET),
        "the state is divided into so many heads",
    ),
    NotZero(
        "attention.sliding_window",
        ("afmoe",),
        "its graph has layers with a window",
        default=0,
    ),
    NotZero("wkv.head_size", _RWKV, "the state is divided into heads of so many"),
)
_CONV, _ROUTER = "ssm_conv1d.weight", "ffn_gate_inp.weight"
_GATED = ("attn_qkv.weight", "attn_gate.weight")
_ATTENTION = ("attn_q.weight", "attn_k.weight", "attn_v.weight")
_INDEXER = ("proj", "attn_k", "attn_q_b")
_ROUTED = ("hy_v3", "mimo2", "step35")
NEEDS = (
    Needs(
        ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"),
        _CONV,
        ("ssm_conv1d.bias",),
    ),
    Needs(("qwen35", "qwen35moe"), _CONV, _GATED),
    Needs(("qwen3next",), _CONV, _GATED, instead="ssm_in.weight"),
    Needs(
        ("glm-dsa",),
        "indexer.k_norm.weight",
        tuple(f"indexer.{name}.weight" for name in _INDEXER),
    ),
    Needs(("kimi-k3",), _ROUTER, ("ffn_up_shexp.weight", "ffn_down_shexp.weight")),
    Needs(
        _KIMI,
        "attn_kv_b.weight",
        ("attn_k_b.weight", "attn_v_b.weight"),
        zero="attention.key_length_mla",
    ),
    Needs(_ROUTED, _ROUTER, ("ffn_down_exps.weight",)),
    Needs(_ROUTED, _ROUTER, ("ffn_up_exps.weight",), instead="ffn_gate_up_exps.weight"),
    Needs(
        ("phi3", "pockettts"),
        "attn_output.weight",
        _ATTENTION,
        instead="attn_qkv.weight",
    ),
    Needs(("rwkv6qwen2",), "time_mix_first.weight", ("time_mix_ln.weight",)),
    Needs(("t5", "t5encoder"), "blk.0.attn_q.weight", ("blk.0.attn_rel_b.weight",)),
)
# Caches of the keys of indexers, whose width libllama divides by: some layer must have one.
INDEXED = ("deepseek4", "dots3note")


def check_rules(header: Header) -> None:
    """Raise DamagedFile if *header*, with the tensors of all files, breaks a rule."""
    # Rules of other architectures do not apply, whatever keys the file has.
    arch = str(header.values.get("general.architecture", ""))
    names = {tensor.name for tensor in header.tensors}
    if arch in INDEXED and not any(n.endswith("indexer.proj.weight") for n in names):
        raise DamagedFile("no layer has the tensor 'indexer.proj.weight'")
    for rule in NOT_ZERO:
        if arch in rule.architectures:
            _check_value(rule, arch, header, names)
    for need in NEEDS:
        if (
            arch not in need.architectures
            or header.values.get(f"{arch}.{need.zero}") == 0
        ):
            continue
        for name in _missing(need, names):
            raise DamagedFile(f"tensor {name!r} is missing")


def _check_value(rule: NotZero, arch: str, header: Header, names: set[str]) -> None:
    stated = {**header.lengths, **header.values}
    key = f"{arch}.{rule.key}"
    # The graph reads the key only where such a tensor is, and another key may stand for it.
    is_read = any(name.endswith(rule.tensor) for name in names)
    if not is_read or f"{arch}.{rule.unless}" in stated:
        return
    if header.values.get(key, rule.default) == 0:
        state = "=0 is not allowed" if key in stated else " is not stated"
        raise DamagedFile(
            f"{key}{state}, because {rule.because}: "
            "the file, or kv_overrides, must give 1 or more"
        )


def _missing(need: Needs, names: set[str]) -> Iterator[str]:
    for name in names:
        # The layer that has the first tensor needs the others, too.
        layer = name.removesuffix(need.tensor)
        if layer == name or (need.instead and layer + need.instead in names):
            continue
        yield from (
            layer + tensor for tensor in need.needed if layer + tensor not in names
        )
