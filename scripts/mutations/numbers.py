"""Numbers that a field should not have, or might."""

from __future__ import annotations

import random

from scripts.mutations.gguf_file import Scalar

NUMBERS = (
    0, 1, 2, 3, 7, 33, 255, 256, 511, 512, 513, 4096, 65535, 65536, 2**24, 2**31 - 1,
    2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, -1, -2, -(2**31),
)  # fmt: skip
WIDE = (*NUMBERS, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
REALS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, -1e30, 3.4e38, float("inf"), float("-inf"),
    float("nan"),
)  # fmt: skip


def number_like(rng: random.Random, kind: int, old: Scalar) -> Scalar:
    """A number that a field of type *kind* should not have, or might."""
    if kind in (6, 12):
        return rng.choice(REALS)
    near: list[int] = []
    if isinstance(old, int):
        near = [old + 1, old - 1, old * 2, old // 2, old * 3, -old]
    return rng.choice([*near, *(WIDE if kind in (10, 11) else NUMBERS)])
