"""
How near values are to those of the same text computed beside others, by whose attention it is.

Our attention computes of a token what does not depend on the tokens beside it: tests then compare
within a few of the last digits of 32 bits. libllama's flash attention sums values in 16 bits for
fewer than 64 rows and in 32 bits for more, so what a text has alone and in a pack, or cut elsewhere,
differs by roundings to 16 bits. That is so on any CPU with `fast_kernels=False`, and by default
where no attention of ours is usable: on x86-64 without AVX2, on other CPUs, beside a device.
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from pyllama_raw.native.kernels import table

# Of the largest value: 32 roundings to 16 bits (2**-11), which layers of random weights carry on.
# Where a router of experts hangs on such digits, 19 of them were seen, else 10.
HALVES = 2.0**-6


def is_usable(*computes: str, needs: str = "") -> bool:
    """Whether a kernel of ours for one of *computes* may be taken here."""
    return any(
        row.is_usable
        for row in table()
        if row.computes in computes and row.needs.startswith(needs)
    )


needs_attention = pytest.mark.skipif(
    not is_usable("attention"),
    reason="this CPU has none of our attention, on which deterministic='fast' stands",
)


# Options of an engine whose outputs do not depend on prompts beside them, which AMX multiplies otherwise.
STEADY: dict[str, Any] = {"deterministic": "fast"}

needs_steady_digits = pytest.mark.skipif(
    not is_usable("attention"),
    reason="libllama's attention has other last digits beside other requests, and roundings of "
    "columns to 8 bits, as of the default model, make other tokens of them",
)


def steady_attention() -> dict[str, Any]:
    """
    Options of a context whose outputs are compared with those beside other requests.

    None where our attention computes. Elsewhere no flash attention, and keys and values of 32 bits: a
    router of experts, or a near tie of tokens, may hang on what is rounded to 16 bits.
    """
    exact = {"flash_attn": "off", "type_k": "f32", "type_v": "f32"}
    return {} if is_usable("attention") else exact


def assert_near(
    values: ArrayLike,
    expected: ArrayLike,
    tolerance: float,
    *,
    fast_kernels: bool = True,
) -> None:
    """
    Assert that *values* are those of *expected*, within *tolerance* where our attention computes.

    Elsewhere within HALVES of the largest value.
    """
    desired = np.asarray(expected)
    largest = np.abs(desired[np.isfinite(desired)]).max(initial=0)
    if not (fast_kernels and is_usable("attention")):
        tolerance = max(tolerance, HALVES * float(largest))
    np.testing.assert_allclose(values, desired, rtol=0, atol=tolerance)
