"""Log-probabilities of the rows of one request, filled in while they are sampled."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.native.arrays import FLOAT32, INT32, pointer, zeros
from pyllama_raw.native.libllama import ffi

MAX_TOP = 1024  # insertion into a sorted list: not for more


class RowScores(NamedTuple):
    """Log-softmax of rows: of one token each, and of the most likely ones."""

    chosen: array[float]  # [n_rows]
    ids: array[int]  # [n_rows * n_top], of a row best first; -1 where there is none
    values: array[float]  # [n_rows * n_top]


class RowLogprobs:
    """
    The record that a row sampler writes when it samples; valid until it does so again.

    Args:
        n_top: most likely tokens to tell.
        of_sampler: of the distribution the token was drawn from, not of the raw row.
    """

    def __init__(self, n_top: int, *, of_sampler: bool = False) -> None:
        check_top(n_top)
        self._ids = zeros(INT32, n_top)
        self._values = zeros(FLOAT32, n_top)
        self.ptr = ffi.new("plr_logprobs *")
        self.ptr.n_top, self.ptr.of_sampler = n_top, of_sampler
        self.ptr.ids = pointer(self._ids, INT32, writable=True)
        self.ptr.values = pointer(self._values, FLOAT32, writable=True)

    @property
    def value(self) -> float:
        """The logprob of the token that was sampled."""
        return float(self.ptr.value)

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(id, logprob) of the most likely tokens, best first."""
        n_found = self.ptr.n_found
        ids, values = self._ids[:n_found].tolist(), self._values[:n_found].tolist()
        return tuple(zip(ids, values, strict=True))


def check_top(n_top: int) -> None:
    """Raise InvalidRequest if so many are not told."""
    if not 0 <= n_top <= MAX_TOP:
        raise InvalidRequest("n_top", n_top, f"0 to {MAX_TOP}")
