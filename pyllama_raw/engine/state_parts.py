"""
The state of a slot in parts of some tokens, so that it is loaded a part at a time.

A load keeps the running streams waiting, and a long state takes longer than a step may.
Only memory of which a range can be saved has parts.

    count, then bytes and tokens of each part, then the parts
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from pyllama_raw.engine.state_file import State
from pyllama_raw.errors import SnapshotFailed

PART_TOKENS = 128
_COUNT, _ENTRY = struct.Struct("<I"), struct.Struct("<QI")


class StatePart(NamedTuple):
    """The state of the positions [start, stop); empty if no row has these."""

    start: int
    stop: int
    state: State


class FileState:
    """A state that was read from a file."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: State) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return self.data.nbytes


def head_bytes(n_parts: int) -> int:
    """Bytes in front of the parts."""
    return _COUNT.size + n_parts * _ENTRY.size


def n_parts_of(n_tokens: int) -> int:
    """Parts of a state of *n_tokens*."""
    return -(-n_tokens // PART_TOKENS)


def make_head(sizes: Sequence[tuple[int, int]]) -> bytes:
    """Head of a file with parts of so many bytes and tokens each."""
    return _COUNT.pack(len(sizes)) + b"".join(_ENTRY.pack(*size) for size in sizes)


def parts_of(data: State) -> list[StatePart]:
    """
    The parts of *data*, which anybody may have written.

    Raises:
        SnapshotFailed: it is no state in parts.
    """
    try:
        (count,) = _COUNT.unpack_from(data)
        at = head_bytes(count)
        sizes = list(_ENTRY.iter_unpack(data[_COUNT.size : at]))
    except struct.error as error:
        raise SnapshotFailed("parts_of", 0, str(error)) from error
    parts: list[StatePart] = []
    n_tokens = 0
    for n_bytes, n_more in sizes:
        part = StatePart(n_tokens, n_tokens + n_more, data[at : at + n_bytes])
        parts.append(part)
        at, n_tokens = at + n_bytes, part.stop
    if at != len(data) or len(parts) != count:
        raise SnapshotFailed("parts_of", 0, "a state of another size")
    return parts
