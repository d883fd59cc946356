"""The bytes of all tokens of a vocabulary."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import overload


class Pieces(Sequence[bytes]):
    """
    One string, out of which pieces are cut when somebody asks for them.

    A vocabulary has up to some hundred thousand, and a process reads few of them.
    """

    def __init__(self, joined: bytes, ends: array[int]) -> None:
        """
        Args:
            ends: ends[i] is where piece i ends in *joined* and the next one begins.
        """
        self._joined = joined
        self._starts = array("q", [0]) + ends

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, token: int) -> bytes: ...

    @overload
    def __getitem__(self, token: slice) -> list[bytes]: ...

    def __getitem__(self, token: int | slice) -> bytes | list[bytes]:
        if isinstance(token, slice):
            return [self[i] for i in range(len(self))[token]]
        if token < 0:
            token = range(len(self))[token]
        starts = self._starts
        return self._joined[starts[token] : starts[token + 1]]
