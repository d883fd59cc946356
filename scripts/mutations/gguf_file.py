"""
A GGUF file as Python values, which can be written again with anything wrong in it.

Nothing is checked here: the files are to be as wrong as a mutation makes them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path

# gguf.h: enum gguf_type, as formats of struct.
FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?",
    10: "Q", 11: "q", 12: "d",
}  # fmt: skip
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
DEFAULT_ALIGNMENT = 32

Scalar = bool | int | float | bytes


@dataclass(slots=True)
class Value:
    """A metadata value; *raw* replaces what would be written of it."""

    type: int
    data: Scalar | list[Scalar]
    item_type: int = 0  # of an array
    raw: bytes | None = None

    def encode(self) -> bytes:
        if self.raw is not None:
            return struct.pack("<I", self.type) + self.raw
        if isinstance(self.data, list):
            head = struct.pack("<IIQ", self.type, self.item_type, len(self.data))
            return head + b"".join(scalar(self.item_type, x) for x in self.data)
        return struct.pack("<I", self.type) + scalar(self.type, self.data)


@dataclass(slots=True)
class Tensor:
    """An entry of the tensor table and its data; *offset* None: where it belongs."""

    name: bytes
    dims: list[int]
    type: int
    data: bytes
    offset: int | None = None


@dataclass(slots=True)
class File:
    """All of a GGUF file."""

    values: dict[bytes, Value] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None  # None: as many as there are
    n_values: int | None = None

    def encode(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_values = len(self.values) if self.n_values is None else self.n_values
        parts = [self.magic, struct.pack("<IqQ", self.version, n_tensors, n_values)]
        for key, value in self.values.items():
            parts += [string(key), value.encode()]
        offset, data = 0, []
        for tensor in self.tensors:
            dims = struct.pack(f"<{len(tensor.dims)}q", *map(signed, tensor.dims))
            at = offset if tensor.offset is None else tensor.offset
            parts += [string(tensor.name), struct.pack("<I", len(tensor.dims)), dims]
            parts.append(struct.pack("<IQ", tensor.type & 0xFFFFFFFF, at % 2**64))
            data.append(padded(tensor.data))
            offset += len(data[-1])
        return padded(b"".join(parts)) + b"".join(data)


def read(path: Path) -> File:
    """The file at *path*, which is in order."""
    raw = path.read_bytes()
    n_tensors, n_values = struct.unpack_from("<qq", raw, 8)
    file, at = File(), 24
    for _ in range(n_values):
        key, at = read_string(raw, at)
        file.values[key], at = read_value(raw, at)
    ends = []
    for _ in range(n_tensors):
        name, at = read_string(raw, at)
        (n_dims,) = struct.unpack_from("<I", raw, at)
        dims = list(struct.unpack_from(f"<{n_dims}q", raw, at + 4))
        at += 4 + 8 * n_dims
        kind, offset = struct.unpack_from("<IQ", raw, at)
        at += 12
        file.tensors.append(Tensor(name, dims, kind, b""))
        ends.append(offset)
    start = -(-at // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    ends.append(len(raw) - start)
    for tensor, begin, end in zip(file.tensors, ends, ends[1:], strict=False):
        tensor.data = raw[start + begin : start + end]
    return file


def read_value(raw: bytes, at: int) -> tuple[Value, int]:
    (kind,) = struct.unpack_from("<I", raw, at)
    at += 4
    if kind != ARRAY:
        data, at = read_scalar(raw, at, kind)
        return Value(kind, data), at
    item_type, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    items: list[Scalar] = []
    for _ in range(count):
        item, at = read_scalar(raw, at, item_type)
        items.append(item)
    return Value(kind, items, item_type), at


def read_scalar(raw: bytes, at: int, kind: int) -> tuple[Scalar, int]:
    if kind == STRING:
        return read_string(raw, at)
    (value,) = struct.unpack_from("<" + FORMATS[kind], raw, at)
    return value, at + struct.calcsize(FORMATS[kind])


def read_string(raw: bytes, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", raw, at)
    return raw[at + 8 : at + 8 + size], at + 8 + size


def scalar(kind: int, value: Scalar) -> bytes:
    """*value* as *kind*: cut to its width, and 0 where it is no number."""
    if kind == STRING:
        return string(value if isinstance(value, bytes) else str(value).encode())
    form = FORMATS.get(kind, "I")
    if isinstance(value, bytes):
        value = 0
    if form in "fd":
        try:
            return struct.pack("<" + form, float(value))
        except OverflowError:
            return struct.pack("<" + form, float("inf"))
    if form == "?":
        return struct.pack("<?", bool(value))
    number = int(value) if math.isfinite(value) else 0
    size = struct.calcsize(form)
    return (number % 2 ** (8 * size)).to_bytes(size, "little")


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % DEFAULT_ALIGNMENT)
