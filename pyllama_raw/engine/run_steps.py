"""Some steps of a driver, up to bounds, for notebooks and experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pyllama_raw.core.request import Finished
from pyllama_raw.core.scheduling.planner import Planner
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import EngineStalled

Why = Literal["max_steps", "max_completed", "max_tokens", "max_duration_s", "idle"]


@dataclass(frozen=True, slots=True)
class StepsRun:
    """What some steps did."""

    steps: int
    completed: int  # requests that ended, in whatever way
    tokens: int  # of outputs
    seconds: float  # on the clock of the driver
    why: Why  # the bound that was reached; "idle": nothing is left to do


class _Ends(Watcher):
    """Counts requests that end, and keeps the error of a scheduler that found no step."""

    def __init__(self) -> None:
        self.n = 0
        self.stalled: EngineStalled | None = None

    def ended(self, end: Finished) -> None:
        self.n += 1
        if isinstance(end.error, EngineStalled):
            self.stalled = end.error


def run_steps(
    driver: Driver,
    *,
    max_steps: int | None = None,
    max_completed: int | None = None,
    max_tokens: int | None = None,
    max_duration_s: float | None = None,
) -> StepsRun:
    """
    Run steps until the first bound is reached or nothing is left to do.

    Bounds are looked at between steps, in their order: the last step may go beyond one.

    Raises:
        EngineStalled: work is left and no step can be made of it. Its requests have ended,
            or wait for what the caller has to bring, such as the rows of an image.
    """
    bounds: dict[Why, float | None] = {
        "max_steps": max_steps,
        "max_completed": max_completed,
        "max_tokens": max_tokens,
        "max_duration_s": max_duration_s,
    }
    ends, before, start = _Ends(), driver.scheduler.stats(), driver.clock()
    driver.watchers.add(ends)
    try:
        while True:
            now = driver.scheduler.stats()
            n_tokens = now.output_tokens - before.output_tokens
            seconds = driver.clock() - start
            done = now.steps - before.steps, ends.n, n_tokens, seconds
            reached = _reached(bounds, done)
            if reached is not None:
                return StepsRun(*done, reached)
            worked = driver.step()
            if ends.stalled is not None:
                raise ends.stalled
            if not worked:
                _check_idle(driver.scheduler)
                return StepsRun(*done, "idle")
    finally:
        driver.watchers.discard(ends)


def _reached(bounds: Mapping[Why, float | None], done: tuple[float, ...]) -> Why | None:
    for (why, bound), value in zip(bounds.items(), done, strict=True):
        if bound is not None and value >= bound:
            return why
    return None


def _check_idle(scheduler: Planner) -> None:
    if not scheduler.has_work:
        return
    held, limits = scheduler.occupancy, scheduler.limits
    raise EngineStalled(
        n_running=held.n_running,
        n_waiting=held.n_waiting,
        n_slots=limits.n_slots,
        n_cells_used=held.n_cells_used,
        n_cells=limits.n_cells,
    )
