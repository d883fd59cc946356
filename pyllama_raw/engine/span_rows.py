"""Rows of a span, as the executor reads them, and where they stand."""

from __future__ import annotations

from typing import Protocol

from pyllama_raw.native.arrays import Array
from pyllama_raw.native.cut import RowRun


class SpanRows(Protocol):
    """
    The payload of a span of a request.

    It is there when the request is opened. Its rows are there, and never change, once the
    scheduler has the request; they stay until the request is closed, because a sequence that
    is preempted is computed again.

    Thread:
        The engine thread reads.
    """

    @property
    def run(self) -> RowRun:
        """The number of rows, their positions, and whether they see each other."""

    @property
    def rows(self) -> Array:
        """Floats of 32 bits, run.n_cells times the width of the model; all are finite."""
