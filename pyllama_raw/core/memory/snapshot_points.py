"""Snapshot points: the places of a prompt that are worth a snapshot. Its chunks end exactly there."""

from __future__ import annotations

from collections.abc import Iterable

from pyllama_raw.core.exact import N_FRESH
from pyllama_raw.core.memory.limits import ContextLimits
from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.sequence import Running


class Points:
    """
    Ends of the chunks of each prompt, for memory that cannot be cut to be captured.

    Args:
        interval: tokens between regular points.
    """

    def __init__(
        self, cache: PrefixCache, limits: ContextLimits, interval: int
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._interval = interval
        self._are_kept = cache.stores and not limits.can_cut

    def plan(self, running: Running) -> None:
        """Find the points of *running*, which begins or has gone on by a leap."""
        if not self._are_kept:
            return
        request = running.request
        junction = self._cache.junction(request.namespace, request.tokens)
        marked = [*request.cache_points, *([] if junction is None else [junction])]
        # Others may ask something else about the same image.
        marked += [span.stop for span in request.spans[-1:]]
        points = snapshot_points(request.n_prompt, self._interval, marked)
        whole = running.sequence.whole
        movable = {self._limits.n_movable(whole(point)) for point in points}
        points_now = {*(p for p in movable if whole(p) == p), *running.points}
        running.points = spaced(points_now, running.n_computed, N_FRESH)

    def reach(self, running: Running) -> bool:
        """Whether *running* is to be captured where it stands; the point is behind then."""
        points, n_computed = running.points, running.n_computed
        while points and points[0] < n_computed:  # what was loaded reached further
            points.pop(0)
        if not points or points[0] > n_computed:
            return False
        points.pop(0)
        return self._are_kept


def snapshot_points(n_prompt: int, interval: int, marked: Iterable[int]) -> set[int]:
    """
    Positions to capture at, each at least 1; what is left is computed on a full hit.

    Args:
        interval: tokens between regular points; 0: none.
        marked: other positions that are of use.
    """
    last = n_prompt - N_FRESH
    regular = range(interval, last, interval) if interval else ()
    return {point for point in (*regular, *marked, last) if 0 < point <= last}


def spaced(points: Iterable[int], start: int, gap: int) -> list[int]:
    """Select the *points*, rising, that are at least *gap* after *start* and each other."""
    kept: list[int] = []
    for point in sorted(points):
        if point >= start + gap:
            kept.append(point)
            start = point
    return kept
