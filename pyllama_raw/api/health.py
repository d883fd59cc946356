"""Health is progress: an engine that has work and takes no step is not healthy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pyllama_raw.engine.engine_state import EngineState
from pyllama_raw.engine.thread import EngineThread


class HealthState(StrEnum):
    """Advice on an engine: use it, wait, or replace it."""

    STARTING = "starting"
    """It takes no requests yet."""
    READY = "ready"
    """It has nothing to do, or does it."""
    STALLED = "stalled"
    """It has work and takes no steps."""
    SLEEPING = "sleeping"
    """It sleeps: requests wait until somebody wakes it."""
    DRAINING = "draining"
    """It takes no new requests; what runs may go on."""
    DEAD = "dead"
    """It has ended."""


@dataclass(frozen=True, slots=True)
class Health:
    """An engine at one moment."""

    state: HealthState
    """Whether it makes progress."""
    last_step_at: float | None
    """The end of the last step, on the engine clock; None: there was none."""
    now: float
    """The moment of this answer, on the engine clock."""
    oldest_wait_s: float
    """Seconds that the oldest waiting request has waited for a slot; 0: none waits."""

    cpu_share: float | None
    """
    The share of their time that decodes had a CPU, over their latest second. Alone it is near 1;
    much less says that other programs take the CPUs. None: not known yet, or a GPU computes.
    """
    step_s: float = 0.0
    """Seconds since the last step ended or work came; 0: there is no work, and so no step."""

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent."""
        return self.state is HealthState.READY


def health(thread: EngineThread, state: EngineState, stall_s: float) -> Health:
    """Thread: any."""
    last_step_at, oldest = thread.loop.driver.last_step_at, thread.opened.oldest
    waits_since = thread.opened.oldest_wait
    now = thread.clock()  # after the moments that it is compared with
    busy_s = 0.0 if oldest is None else now - max(oldest, last_step_at or oldest)
    oldest_wait_s = 0.0 if waits_since is None else now - waits_since
    found = HealthState.READY
    if state.has_ended:
        found = HealthState.DEAD
    elif state is EngineState.SLEEPING:
        found = HealthState.SLEEPING
    elif busy_s > stall_s:
        found = HealthState.STALLED
    elif state is EngineState.CLOSING:
        found = HealthState.DRAINING
    elif state is EngineState.LOADING or not thread.has_begun:
        found = HealthState.STARTING
    return Health(
        found,
        last_step_at,
        now,
        max(oldest_wait_s, 0.0),
        thread.loop.cpu_share.latest,
        max(busy_s, 0.0),
    )
