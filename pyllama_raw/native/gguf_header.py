"""
Facts of a model file that are known before libllama opens it: cheap and well worded.

The header of a GGUF file is numbers in little-endian order: counts, then metadata (key,
type, value), then the tensor table (name, dimensions, type, offset), then, aligned, the
data. Nothing of it is trusted: every length is compared with what is left of the file.
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from pyllama_raw.errors import ModelLoadFailed
from pyllama_raw.native.libllama import ffi, lib

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
        raise DamagedFile(error.strerror or str(error)) from error


def _read_file(path: Path) -> Header:
    # Nothing is opened that is no file.
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise DamagedFile("this is a directory")
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
