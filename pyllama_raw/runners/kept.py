"""Runners that are kept for a while, those longest unused given up first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from anyio import CancelScope

from pyllama_raw.errors import ClosedError
from pyllama_raw.runners.runner import ModelRunner

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Entry:
    runner: ModelRunner
    used_at: float
    checked_at: float


class KeptRunners(Generic[K]):
    """
    Runners by a key, such as a model and a device.

    A runner that is given up serves its calls to their end, and is closed then; aclose() closes
    all at once.

    Args:
        max_kept: runners at most.
        ttl_s: seconds without use after which one is given up.
        health_s: seconds after which one is asked whether it is well.
        evicted: called with the key of what is given up, before that is closed; what it raises
            is logged.
    """

    def __init__(
        self,
        max_kept: int = 5,
        *,
        ttl_s: float = 60.0,
        health_s: float = 10.0,
        evicted: Callable[[K], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._max, self._ttl_s, self._health_s = max_kept, ttl_s, health_s
        self._evicted, self._clock = evicted, clock
        self._entries = dict[K, _Entry]()  # longest unused first
        self._closed = False
        self._retiring: list[ModelRunner] = []  # serve their last calls
        self._n_gets = self._n_hits = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of gets that found a runner; None: there were none."""
        return self._n_hits / self._n_gets if self._n_gets else None

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, key: K) -> ModelRunner | None:
        """The runner of *key*, if it is there and well."""
        self._n_gets += 1
        now = self._clock()
        for unused, entry in [*self._entries.items()]:
            if now - entry.used_at > self._ttl_s and not entry.runner.n_open:
                await self._give_up(unused)
        hit = self._entries.get(key)
        if hit is None:
            return None
        if now - hit.checked_at >= self._health_s:
            hit.checked_at = now
            is_well = (await hit.runner.health()).ready
            if self._entries.get(key) is not hit:  # given up or replaced meanwhile
                return None
            if not is_well:
                await self._give_up(key)
                return None
        hit.used_at = now
        self._entries[key] = self._entries.pop(key)
        self._n_hits += 1
        return hit.runner

    async def put(self, key: K, runner: ModelRunner) -> None:
        """
        Keep *runner*; one that had the key is given up.

        Raises:
            ClosedError: all are given up, and *runner* with them.
        """
        old = self._entries.get(key)
        if old is None or old.runner is not runner:
            await self._give_up(key)
        if self._closed:
            await runner.aclose()
            raise ClosedError("these kept runners are closed: make others")
        now = self._clock()
        self._entries.pop(key, None)
        self._entries[key] = _Entry(runner, now, now)
        while len(self._entries) > self._max:
            await self._give_up(next(iter(self._entries)))

    async def aclose(self) -> None:
        """Give up all, and close what serves still. Can be repeated."""
        self._closed = True
        for key in [*self._entries]:
            await self._give_up(key)
        with CancelScope(shield=True):
            for runner in self._retiring:
                await runner.aclose()
        self._retiring.clear()

    async def _give_up(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        try:
            self._evicted(key)
        except Exception:
            logger.exception("evicted(%r) failed", key)
        self._retiring = [runner for runner in self._retiring if runner.n_open]
        self._retiring.append(entry.runner)
        with CancelScope(shield=True):
            await entry.runner.retire()
