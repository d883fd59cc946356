"""Runners that are kept for a while, those longest unused given up first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from pyllama_raw.runners.runner import ModelRunner

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Kept:
    runner: ModelRunner
    used_at: float
    checked_at: float


class KeptRunners(Generic[K]):
    """
    Runners by a key, such as a model and a device.

    Args:
        max_kept: runners at most.
        ttl_s: seconds without use after which one is given up.
        health_s: seconds after which one is asked whether it is well.
        evicted: called with the key of what is given up, before that is closed.
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
        self._kept = dict[K, _Kept]()  # longest unused first
        self._n_gets = self._n_hits = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of gets that found a runner; None: there were none."""
        return self._n_hits / self._n_gets if self._n_gets else None

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: K) -> ModelRunner | None:
        """The runner of *key*, if it is there and well."""
        self._n_gets += 1
        now = self._clock()
        for each, kept in [*self._kept.items()]:
            if now - kept.used_at > self._ttl_s and not kept.runner.n_open:
                await self._give_up(each)
        found = self._kept.get(key)
        if found is not None and now - found.checked_at >= self._health_s:
            found.checked_at = now
            if not (await found.runner.health()).ready:
                await self._give_up(key)
                return None
        if found is None:
            return None
        found.used_at = now
        self._kept[key] = self._kept.pop(key)
        self._n_hits += 1
        return found.runner

    async def put(self, key: K, runner: ModelRunner) -> None:
        """Keep *runner*; one that had the key is given up."""
        await self._give_up(key)
        now = self._clock()
        self._kept[key] = _Kept(runner, now, now)
        while len(self._kept) > self._max:
            await self._give_up(next(iter(self._kept)))

    async def aclose(self) -> None:
        """Give up all."""
        for key in [*self._kept]:
            await self._give_up(key)

    async def _give_up(self, key: K) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._evicted(key)
            await kept.runner.aclose()
