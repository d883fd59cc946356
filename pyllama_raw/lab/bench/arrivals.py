"""
When calls come in an open loop.

Gaps are gamma distributed: burstiness 1 is a Poisson process, below 1 calls come in
bursts, above 1 more evenly. The last of n calls comes at n / rate for every seed, so that
runs with the same rate last equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from pyllama_raw.lab.bench.call import Call


def arrivals(rng: Random, n: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """
    Args:
        rate: calls a second, above 0.
        burstiness: the shape of the gamma distribution of gaps, above 0.

    Returns:
        Seconds after the start, in order.
    """
    times = list(accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(n)))
    last = times[-1]
    return [time * (n / rate) / last for time in times] if last > 0 else [0.0] * n


def timed(calls: Sequence[Call], times: Sequence[float]) -> list[Call]:
    """The same *calls*, each at its time."""
    pairs = zip(calls, times, strict=True)
    return [replace(call, at_s=time) for call, time in pairs]
