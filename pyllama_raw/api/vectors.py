"""Vectors that texts have become. Imports numpy, so whoever needs it imports it late."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama_raw.api.results import Usage


class Vectors(np.ndarray[tuple[int, int], np.dtype[np.float32]]):
    """An array of float32 with a row for each vector; what is made of it is one, too."""

    usage = Usage(0, 0, 0)
    """Tokens of the texts; none of them is an output."""

    def __array_finalize__(self, other: Any) -> None:
        """Keep the usage of the array that this one is made of."""
        self.usage = getattr(other, "usage", Vectors.usage)


def vectors_of(rows: NDArray[np.float32], n_tokens: int, *, normalize: bool) -> Vectors:
    """A copy of *rows*, made as long as 1 if *normalize*; one of zeros stays so."""
    vectors = rows.copy().view(Vectors)
    vectors.usage = Usage(n_tokens, 0, 0)
    if normalize:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        np.divide(rows, lengths, out=vectors, where=lengths > 0)
    return vectors
