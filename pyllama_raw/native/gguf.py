"""
Model files: facts that are known before libllama opens one, and files that would end the process.

The header of a GGUF file is numbers in little-endian order: counts, then metadata (key,
type, value), then the tensor table (name, dimensions, type, offset), then, aligned, the
data. Nothing of it is trusted: every length is compared with what is left of the file.

Files that libllama would end the process with are refused before it opens them. It computes with
any type that a tensor names: one that has no product is a call of a null pointer at the first
decode. Shapes it compares with the metadata itself. Of some architectures it assumes more of the
metadata and the tensors: those are rules, in tables.
"""

from __future__ import annotations

import math
import mmap
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pyllama_raw.errors import ModelLoadFailed, reason_of
from pyllama_raw.native.libllama import ffi, lib, text

ALIGNMENT = "general.alignment"
LABELS = ".classifier.output_labels"  # behind the name of the architecture
MAX_LABELS = 1024
MAX_VALUES = 2**16
MAX_TENSORS = 2**20
MAX_DIMS = 4  # ggml.h: GGML_MAX_DIMS
MAX_NAME = 63  # ggml.h: GGML_MAX_NAME, without the final NUL
MAX_PARTS = 2**12  # which no model has; a name may say 99999
# magic, version, number of tensors, number of metadata pairs
_HEADER = struct.Struct("<4sIqq")
_MIN_PAIR_BYTES = 8 + 4 + 1  # key length, type, smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dimensions, one size, type, offset
_STRING, _ARRAY = 8, 9  # gguf.h: enum gguf_type; the others are numbers
_NUMBERS = {
    kind: struct.Struct("<" + code)
    for kind, code in (
        (0, "B"), (1, "b"), (2, "H"), (3, "h"), (4, "I"), (5, "i"), (6, "f"), (7, "?"),
        (10, "Q"), (11, "q"), (12, "d"),
    )
}  # fmt: skip
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]
_PART = re.compile(r"(?s)(.*)-(\d{5})-of-(\d{5})\.gguf")
Scalar = bool | int | float | str
NO_OVERRIDES: Mapping[str, Scalar] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table."""

    name: str
    dims: tuple[int, ...]
    type: int  # ggml.h: enum ggml_type, if it is one
    offset: int  # from the start of the data


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a model file before its data."""

    values: Mapping[str, Scalar]  # metadata without arrays
    lengths: Mapping[str, int]  # of the arrays
    tensors: tuple[TensorInfo, ...]
    n_left: int  # bytes behind the tensor table, from the next aligned one on
    alignment: int
    labels: tuple[str, ...] = ()  # of the scores that a ranking model gives

    def overridden(self, values: Mapping[str, Scalar]) -> Header:
        """The header as libllama takes it with kv_overrides."""
        return replace(self, values={**self.values, **values})


class DamagedFile(Exception):
    """The file is not what a GGUF file must be; the text says where."""


def read_header(path: str) -> Header:
    """
    The header of the file at *path*.

    Raises:
        ModelLoadFailed: there is no such file, or it is damaged.
    """
    try:
        return header_of(path)
    except DamagedFile as error:
        name = path.replace("\0", "\\0")
        raise ModelLoadFailed(name, str(error)) from error.__cause__


def header_of(path: str) -> Header:
    """Like read_header(). Raises DamagedFile, from an OSError if the file cannot be read."""
    if "\0" in path:
        raise DamagedFile("the path contains a NUL")
    try:
        return _read_file(Path(path))
    except OSError as error:
        raise DamagedFile(reason_of(error)) from error


def _read_file(path: Path) -> Header:
    # Nothing is opened that is no file.
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise DamagedFile("this is a directory: give a file in it")
    if not stat.S_ISREG(status.st_mode):  # to open a FIFO would wait for its writer
        raise DamagedFile("this is not a regular file")
    with path.open("rb") as stream:
        n_tensors, n_values = _counts(stream.read(_HEADER.size), status.st_size)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).header(n_tensors, n_values)


def _counts(head: bytes, size: int) -> tuple[int, int]:
    if not head:
        raise DamagedFile("the file is empty")
    if head[:4] != b"GGUF":
        raise DamagedFile(f"not a GGUF file, it starts with {head[:4]!r}")
    if len(head) < _HEADER.size:
        raise DamagedFile(f"the header is cut off after {len(head)} bytes")
    # Files before version 2 have other widths; those of other machines a version of 2**24 or more.
    _, version, n_tensors, n_values = _HEADER.unpack(head)
    if not 2 <= version <= lib.GGUF_VERSION:
        raise DamagedFile(
            f"GGUF version {version} cannot be read here: 2 to {lib.GGUF_VERSION} can"
        )
    # Counts that the file has no room for would make lists as long as they say.
    least = n_tensors * _MIN_TENSOR_BYTES + n_values * _MIN_PAIR_BYTES
    if min(n_tensors, n_values) < 0 or least > size:
        raise DamagedFile(
            f"damaged header: {n_tensors} tensors and {n_values} metadata entries "
            f"do not fit {size} bytes"
        )
    if n_tensors > MAX_TENSORS or n_values > MAX_VALUES:
        raise DamagedFile(
            f"damaged header: {n_tensors} tensors and {n_values} metadata entries, "
            f"at most {MAX_TENSORS} and {MAX_VALUES} are read"
        )
    return n_tensors, n_values


class _Reader:
    """Reads one file from the front; what would lie behind its end is DamagedFile."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._size = content, len(content)
        self._at = _HEADER.size
        self._place = "the header"  # what is being read, for messages

    def header(self, n_tensors: int, n_values: int) -> Header:
        values: dict[str, Scalar] = {}
        lengths: dict[str, int] = {}
        labels: tuple[str, ...] = ()
        for index in range(n_values):
            self._place = f"metadata entry {index}"
            # Of two equal keys libllama takes one, and a check could have read the other.
            key = self._string()
            if not key or key in values or key in lengths:
                raise DamagedFile(
                    f"{self._place} has the key {key!r}, as an earlier one"
                )
            self._place = key
            kind = self._number(_U32)
            # Arrays, as those of a vocabulary, are skipped. Names of classes are few and of use.
            if kind == _ARRAY:
                start = self._at
                lengths[key] = self._skip_array()
                if key.endswith(LABELS) and lengths[key] <= MAX_LABELS:
                    labels = self._strings_at(start)
            else:
                values[key] = self._scalar(kind)
        tensors = []
        for index in range(n_tensors):
            self._place = f"tensor {index}"
            tensors.append(self._tensor())
        # Data begins at the next aligned byte.
        alignment = _alignment(values)
        n_left = self._size - -(-self._at // alignment) * alignment
        return Header(values, lengths, tuple(tensors), n_left, alignment, labels)

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        value: Scalar = self._number(self._format(kind))
        return value

    def _skip_array(self) -> int:
        """Skip an array; return its number of values."""
        kind = self._number(_U32)
        count = self._number(_U64)
        # Each string has a length of its own: C walks over them. Numbers are skipped at once.
        if kind == _STRING:
            self._skip_strings(count)
        else:
            self._skip(count * self._format(kind).size)
        return count

    def _strings_at(self, start: int) -> tuple[str, ...]:
        """The strings of an array at *start* that was skipped; none, if it has numbers."""
        end, self._at = self._at, start
        kind, count = self._number(_U32), self._number(_U64)
        strings = (self._string() for _ in range(count if kind == _STRING else 0))
        texts = tuple(strings)
        self._at = end
        return texts

    def _tensor(self) -> TensorInfo:
        name = self._string()
        self._place = f"tensor {name!r}"
        n_dims = self._number(_U32)
        if not 0 < n_dims <= MAX_DIMS:
            raise DamagedFile(
                f"{self._place} has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed"
            )
        dims = tuple(self._number(_U64) for _ in range(n_dims))
        return TensorInfo(name, dims, self._number(_U32), self._number(_U64))

    def _format(self, kind: int) -> struct.Struct:
        if kind not in _NUMBERS:
            raise DamagedFile(f"{self._place} has the type {kind}, which there is not")
        return _NUMBERS[kind]

    def _number(self, form: struct.Struct) -> int:
        start = self._at
        self._skip(form.size)
        number: int = form.unpack_from(self._content, start)[0]
        return number

    def _string(self) -> str:
        length = self._number(_U64)
        start = self._at
        self._skip(length)
        return self._content[start : self._at].decode("utf-8", "backslashreplace")

    def _skip(self, n_bytes: int) -> None:
        # The one place that moves on, so no length is believed anywhere.
        left = self._size - self._at
        if n_bytes > left:
            raise DamagedFile(
                f"{self._place} is cut off or damaged: {n_bytes} bytes of it should "
                f"follow, the file has {left} more"
            )
        self._at += n_bytes

    def _skip_strings(self, count: int) -> None:
        with ffi.from_buffer("uint8_t[]", self._content) as data:
            end = lib.plr_skip_strings(data, self._size, self._at, count)
        if end < 0:
            raise DamagedFile(f"{self._place} is cut off or damaged: {count} strings")
        self._at = end


def _alignment(values: Mapping[str, Scalar]) -> int:
    value = values.get(ALIGNMENT, lib.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise DamagedFile(f"{ALIGNMENT}={value!r} is not allowed: give a power of 2")
    return value


def split_names(path: str) -> list[str]:
    """
    Names of all files of the divided model that *path* is a part of; none: it is whole.

    llama.h, llama_split_path: "/models/ggml-model-q4_0", 2, 4 ->
    "/models/ggml-model-q4_0-00002-of-00004.gguf"
    """
    match = _PART.fullmatch(path)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return []
    numbers = range(1, int(match[3]) + 1)
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in numbers]


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
