"""Who wants to know what becomes of requests and of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.scheduling.planner import SlotChange

EngineChange = Literal["running", "closing", "closed", "failed"]


class Watcher:
    """
    Is told in the thread that runs steps, and must return soon. One that raises is told
    nothing more.

    A subclass says what it wants to know; times are on the engine clock.
    """

    def came(self, requests: Sequence[Request], submitted: float) -> None:
        """*requests* wait now. Context variables are those of the caller of the requests."""

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        """A request got a slot, or gave it up and waits again."""

    def ended(self, end: Finished) -> None:
        """A request has ended, also one that came before anybody watched."""

    def engine(self, change: EngineChange, now: float) -> None:
        """What is told first, with the present state, and last of all at the end."""
