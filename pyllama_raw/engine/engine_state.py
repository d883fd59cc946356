"""States of an engine, one enum for statistics, events and health. All of the API imports it."""

from __future__ import annotations

from enum import StrEnum


class EngineState(StrEnum):
    """What an engine does, and whether it takes requests."""

    IDLE = "idle"
    """It is not opened: the value of `AsyncEngine.open()` before anybody awaits it."""
    LOADING = "loading"
    """
    It is being opened, makes its context anew after a failure, or loads its weights after a
    sleep; requests wait.
    """
    READY = "ready"
    """It takes requests, and has none."""
    RUNNING = "running"
    """It has requests, and takes more."""
    SLEEPING = "sleeping"
    """Its memory is free for others; requests wait until `wake()`."""
    CLOSING = "closing"
    """It refuses new requests; those that run may go on."""
    CLOSED = "closed"
    """It was closed."""
    ERROR = "error"
    """It has ended by itself; `AsyncEngine.error` says why."""

    @property
    def has_ended(self) -> bool:
        """Whether no other state follows."""
        return self in (EngineState.CLOSED, EngineState.ERROR)
