"""
Facts that an engine tells of itself without a wait, for AsyncEngine and Engine.

Health is progress: an engine that has work and takes no step is not healthy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pyllama_raw.api.model import Owner
from pyllama_raw.engine.info import EngineState
from pyllama_raw.errors import shown
from pyllama_raw.options.arguments import checked_wait

if TYPE_CHECKING:
    from concurrent.futures import Future

    # the rest comes in while a model loads
    from pyllama_raw.api.results import EngineStats
    from pyllama_raw.api.session import Sessions
    from pyllama_raw.engine.adapters import AdapterInfo
    from pyllama_raw.engine.info import Capabilities, EngineInfo
    from pyllama_raw.engine.logs import RequestRecord
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.engine.thread import EngineThread
    from pyllama_raw.engine.watcher import StepRecord, Watcher

STALL_S = 60.0


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


class Facts(Owner):
    """An engine as far as nothing is waited for. Any thread may ask, also after the end."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @property
    def _parts(self) -> EngineParts:
        return self._sessions.current.parts

    @property
    def _thread(self) -> EngineThread:
        return self._sessions.current.thread

    def __repr__(self) -> str:
        """The model, the requests that run and those that wait, as of the latest step."""
        name = shown(self.model_name or "model without a name")
        state, stats = self.state, self._thread.stats
        return (
            f"<{type(self).__name__} of {name}: {state}, {stats.n_slots} "
            f"slots, {stats.running} run, {stats.waiting} wait>"
        )

    @property
    def alive(self) -> bool:
        """Whether requests are taken: not once it is closed or has failed."""
        return not (self.state is EngineState.CLOSING or self.state.has_ended)

    @property
    def state(self) -> EngineState:
        """The state of the engine: what it does, and whether it takes requests."""
        return self._sessions.state

    @property
    def error(self) -> BaseException | None:
        """The error that has ended the engine by itself; None: nothing did."""
        return self._thread.error

    @property
    def model_name(self) -> str | None:
        """The name that the model file gives its model."""
        return self._parts.metadata.get("general.name")

    @property
    def info(self) -> EngineInfo:
        """The model, what the options came to, and versions."""
        return self._sessions.current.info

    @property
    def capabilities(self) -> Capabilities:
        """The uses of the model; for the rest, why it has none."""
        return self._sessions.current.capabilities

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests can name."""
        return self._thread.adapters.all()

    @property
    def n_ctx_slot(self) -> int:
        """Prompt and output tokens one request may have together."""
        return self._parts.scheduler.limits.n_ctx_slot

    def stats(self) -> EngineStats:
        """
        Running, waiting, slots, KV cells and totals, as of the latest step.

        `state` tells whether the engine has ended. `dataclasses.asdict` makes JSON of it,
        as of every value of statistics.
        """
        return self._sessions.stats(self.queue_s)

    @property
    def queue_s(self) -> float | None:
        """
        Seconds until a request that comes now has a slot, as `stats()` tells them, for less.

        0 while a slot is free, None before any request has ended.
        """
        return self._thread.pace.queue_s

    def health(self, stall_s: float = STALL_S) -> Health:
        """
        Whether the engine makes progress: answered at once, also if it is stuck.

        Args:
            stall_s: seconds with work and without a step that are too many. One step of a
                long prompt may take some.
        """
        return health(self._thread, self.state, checked_wait("stall_s", stall_s))

    def clock(self) -> float:
        """Now, in the seconds that records, events and deadlines have."""
        return self._thread.clock()

    def watch(self, watcher: Watcher) -> Future[None]:
        """
        Tell *watcher* what happens, from soon on: the future is done once that has begun.

        Raises:
            ClosedError, EngineStopped: the engine has ended.
        """
        return self._sessions.watch(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell *watcher* nothing more, soon; can be repeated."""
        self._sessions.unwatch(watcher)

    def step_log(self) -> list[StepRecord]:
        """The last steps, the oldest first: as many as `LogConfig.max_steps`."""
        return list(self._parts.logs.steps or ())

    def request_log(self) -> list[RequestRecord]:
        """The last requests that have ended: as many as `LogConfig.max_requests`."""
        return list(self._parts.logs.requests or ())


def health(thread: EngineThread, state: EngineState, stall_s: float) -> Health:
    """The health of the engine that *thread* serves, which is in *state*. Thread: any."""
    last_step_at, oldest = thread.driver.last_step_at, thread.records.oldest
    waits_since = thread.records.oldest_wait
    now = thread.clock()  # after the moments that it is compared with
    busy_s = 0.0 if oldest is None else now - max(oldest, last_step_at or oldest)
    oldest_wait_s = 0.0 if waits_since is None else now - waits_since
    health_state = HealthState.READY
    if state.has_ended:
        health_state = HealthState.DEAD
    elif state is EngineState.SLEEPING:
        health_state = HealthState.SLEEPING
    elif busy_s > stall_s:
        health_state = HealthState.STALLED
    elif state is EngineState.CLOSING:
        health_state = HealthState.DRAINING
    elif state is EngineState.LOADING or not thread.has_begun:
        health_state = HealthState.STARTING
    return Health(
        health_state,
        last_step_at,
        now,
        max(oldest_wait_s, 0.0),
        thread.cpu_share.latest,
        max(busy_s, 0.0),
    )
