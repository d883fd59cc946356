"""Products of parameters, of which a test tries a part each time and the rest by night."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

# One model of each class of memory: attention, a window, a state, both.
CLASSES = ("llama", "gemma3", "mamba", "jamba")


def in_turn(
    *axes: Sequence[Any], always: Callable[..., bool] = lambda *_: False
) -> list[Any]:
    """
    The product of *axes* for `pytest.mark.parametrize`.

    Each value of each axis is tried beside a value of each other one, as they come in turn; all
    other combinations are nightly.

    Args:
        always: says of values, one of each axis, that they are tried each time as well.
    """
    n = max(map(len, axes))
    # Each round of an axis begins one value later than its last one, and that of the next axis
    # two: so two axes of equal length do not go side by side.
    picks = {
        tuple((i + i // len(axis) * k) % len(axis) for k, axis in enumerate(axes))
        for i in range(n)
    }
    return [
        pytest.param(
            *values, marks=() if at in picks or always(*values) else pytest.mark.nightly
        )
        for at, values in zip(
            product(*(range(len(axis)) for axis in axes)), product(*axes), strict=True
        )
    ]


def of_a_class(name: Any, *_: Any) -> bool:
    """Whether a model is the one that stands for its class of memory."""
    return name in CLASSES
