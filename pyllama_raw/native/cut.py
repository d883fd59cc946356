"""
The form that a projector gives an image or a sound before encoding, as plain numbers.

It is a list of runs: tokens that the projector writes around and between, and rows that an
encode fills. A row takes a cell, as a token does. Positions have rules of their own: with M-RoPE
the rows of an image have a place in it, and the text behind goes on as if the image were as
long as its longer side.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import lib


class TokenRun(NamedTuple):
    """Tokens that the projector writes."""

    tokens: array[int]

    @property
    def n_cells(self) -> int:
        return len(self.tokens)

    @property
    def n_pos(self) -> int:
        return len(self.tokens)


class RowRun(NamedTuple):
    """Rows of embeddings: a whole image or sound, or a slice of one."""

    n_cells: int
    n_pos: int  # positions until what stands behind
    is_causal: bool  # if not, all rows see each other: they are computed in one decode
    positions: tuple[array[int], ...]  # of the rows if they begin at 0: 1 section or 4
    moves: tuple[bool, ...]  # whether positions of a section count from the beginning

    def positions_at(
        self, pos: int, start: int = 0, stop: int | None = None
    ) -> array[int]:
        """Positions of rows [start, stop), section by section, if the run begins at *pos*."""
        placed = array("i")
        for section, moves in zip(self.positions, self.moves, strict=True):
            part = section[start:stop]
            placed += array("i", [at + pos for at in part]) if moves else part
        return placed


Run = TokenRun | RowRun


class Cut(Handle):
    """Runs of one image or sound; it keeps the pixels or the spectrum for the encodes."""

    def __init__(self, pointer: Any, projector: Handle) -> None:
        super().__init__(pointer, lib.mtmd_input_chunks_free, parents=[projector])
        self.runs: tuple[Run, ...] = ()  # read from the chunks by Projector.cut()
        self.projector = projector  # no other one knows the content
