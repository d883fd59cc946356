"""
When calls come in an open loop.

Gaps are gamma distributed: burstiness 1 is a Poisson process, below 1 calls come in
bursts, above 1 more evenly. The last of n calls comes at n / rate for every seed, so that
runs with the same rate last equally long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from pyllama_raw.bench.call import Call
from pyllama_raw.errors import ConfigError


def arrivals(rng: Random, n: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """
    Args:
        rate: calls a second; infinite: all at once.
        burstiness: the shape of the gamma distribution of gaps.

    Returns:
        Seconds after the start, in order.

    Raises:
        ConfigError: a number is not above 0.
    """
    check(rate, burstiness)
    if math.isinf(rate):
        return [0.0] * n
    times, now = [], 0.0
    for _ in range(n):
        now += rng.gammavariate(burstiness, 1.0)
        times.append(now)
    return [time * (n / rate) / now for time in times] if now > 0 else [0.0] * n


def check(rate: float, burstiness: float) -> None:
    """
    Raises:
        ConfigError: a number is not above 0.
    """
    if not rate > 0:
        raise ConfigError(f"rate={rate}: give calls a second above 0")
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"burstiness={burstiness}: give a number above 0")


def timed(calls: Sequence[Call], times: Sequence[float]) -> list[Call]:
    """The same *calls*, each at its time."""
    pairs = zip(calls, times, strict=True)
    return [replace(call, at_s=time) for call, time in pairs]
