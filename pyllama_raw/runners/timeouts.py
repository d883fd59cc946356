"""
Times that the parts of an answer may take.

A limit of the whole alone says little of a stream: one that hangs at its beginning is found by
`first_token_s`, one that hangs later by `between_tokens_s`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from anyio import current_time, move_on_after

from pyllama_raw.runners.errors import RunnerTimeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds. None: there is none."""

    connect_s: float | None = 10.0
    """Until the connection is made."""
    first_token_s: float | None = 300.0
    """From the request to its first delta, with the wait in a queue."""
    between_tokens_s: float | None = 60.0
    """Between deltas, and to the end."""
    total_s: float | None = 600.0
    """For all of it."""
    health_s: float = 3.0
    """For an answer to health()."""


async def timed(
    source: AsyncGenerator[T, None], timeouts: Timeouts, n_free: int = 1
) -> AsyncGenerator[T, None]:
    """
    *source*, with limits of time.

    Args:
        n_free: items at the beginning that are no token.

    Raises:
        RunnerTimeout: a part took too long; *source* is closed.
    """
    began = current_time()
    n_items = 0
    async with aclosing(source):
        while True:
            what, deadline = _next_limit(timeouts, began, n_items <= n_free)
            with move_on_after(max(deadline - current_time(), 0)) as scope:
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            if scope.cancelled_caught:
                raise RunnerTimeout(what, getattr(timeouts, f"{what}_s"))
            n_items += 1
            yield item


def _next_limit(timeouts: Timeouts, began: float, is_first: bool) -> tuple[str, float]:
    """The limit that is reached first, and when."""
    what = "first_token" if is_first else "between_tokens"
    since = began if is_first else current_time()
    limits = {what: since, "total": began}
    ends = {
        name: at + limit
        for name, at in limits.items()
        if (limit := getattr(timeouts, f"{name}_s")) is not None
    }
    first = min(ends, key=ends.__getitem__, default="total")
    return first, ends.get(first, float("inf"))
