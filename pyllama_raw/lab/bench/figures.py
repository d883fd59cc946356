"""
Figures of one run: latencies, peaks, and the limits of goodput.

A percentile is a value that occurred: the smallest one that so many per cent do not
exceed. Without values a figure is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING

from pyllama_raw.api.results import percentile
from pyllama_raw.errors import ConfigError

if TYPE_CHECKING:
    from pyllama_raw.lab.bench.call import Record

PERCENTILES = (90, 99)


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of above[i] / below[i], i being the round."""
    return median(a / b for a, b in zip(above, below, strict=True))


def summary_ms(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, std, p90, p99 and max of *values_s*, keyed as vLLM keys them."""
    values = [value * 1e3 for value in values_s]
    figures: dict[str, float | None] = dict.fromkeys(_keys(name))
    if values:
        shown = [fmean(values), median(values), pstdev(values)]
        shown += [percentile(values, percent) for percent in PERCENTILES]
        figures = dict(zip(_keys(name), [*shown, max(values)], strict=True))
    return figures


def _keys(name: str) -> list[str]:
    labels = ["mean", "median", "std", *(f"p{p}" for p in PERCENTILES), "max"]
    return [f"{label}_{name}_ms" for label in labels]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request has to keep to count as good; None: no limit."""

    ttft: float | None = None  # ms
    tpot: float | None = None  # ms
    e2el: float | None = None  # ms

    @classmethod
    def parse(cls, words: Iterable[str]) -> Limits | None:
        """
        Args:
            words: as "ttft:200", in milliseconds.

        Returns:
            None if there are no words.

        Raises:
            ConfigError: a word is none of these.
        """
        given = dict(_limit(word) for word in words)
        return cls(**given) if given else None

    def kept_by(self, record: Record) -> bool:
        """An output of one token has no TPOT, and keeps every limit of it."""
        if not record.completed or not record.times:
            return False
        found = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.e2e_s}
        limits = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}
        return all(
            limit is None or (found[name] or 0.0) * 1e3 <= limit
            for name, limit in limits.items()
        )


def _limit(word: str) -> tuple[str, float]:
    name, _, value = word.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if name not in ("ttft", "tpot", "e2el") or not limit > 0:
        allowed = "ttft:MS, tpot:MS or e2el:MS, with milliseconds above 0"
        raise ConfigError(f"goodput={word!r}: give {allowed}")
    return name, limit


def peak_tok_per_s(records: Iterable[Record]) -> float:
    """Output tokens of the best second; seconds are counted from the first send."""
    seconds: dict[int, int] = {}
    records = list(records)
    started = min((record.sent for record in records), default=0.0)
    for record in records:
        for time, count in zip(record.times, record.counts, strict=True):
            second = int(time - started)
            seconds[second] = seconds.get(second, 0) + count
    return float(max(seconds.values(), default=0))


def peak_concurrency(records: Iterable[Record]) -> int:
    """Most calls that were under way at once; an end comes before a start."""
    changes = []
    for record in records:
        if record.times:
            changes += [(record.sent, 1), (record.times[-1], -1)]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
