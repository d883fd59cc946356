"""Where a prompt is worth a snapshot; its prefill chunks end exactly there."""

from __future__ import annotations

from collections.abc import Iterable


def snapshot_points(
    n_prompt: int,
    *,
    interval: int = 0,
    n_tail: int = 1,
    junction: int | None = None,
    cache_points: Iterable[int] = (),
) -> tuple[int, ...]:
    """
    Positions to capture at, rising, each at least 1 and less than *n_prompt*.

    Args:
        interval: tokens between regular points; 0: none.
        n_tail: tokens left after the last point, to be computed on a full hit; 0: no such
            point.
        junction: where this prompt parts from others.
        cache_points: what the caller marked.
    """
    points = set(cache_points)
    if junction is not None:
        points.add(junction)
    if interval:
        points.update(range(interval, n_prompt, interval))
    if n_tail:
        points.add(n_prompt - n_tail)
    last = n_prompt - max(n_tail, 1)
    return tuple(sorted(point for point in points if 0 < point <= last))


def spaced(points: Iterable[int], start: int, gap: int) -> list[int]:
    """Those of *points*, rising, that are at least *gap* after *start* and each other."""
    kept: list[int] = []
    for point in sorted(points):
        if point >= start + gap:
            kept.append(point)
            start = point
    return kept
