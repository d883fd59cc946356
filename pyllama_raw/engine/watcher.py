"""Who wants to know what becomes of requests."""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_raw.core.request import Finished, Request


class Watcher:
    """
    Is told by a driver, in the thread that runs steps: it must return soon.

    A subclass says what it wants to know; times are on the engine clock.
    """

    def came(self, requests: Sequence[Request], submitted: float) -> None:
        """*requests* wait now."""

    def ended(self, end: Finished) -> None:
        """A request has ended, also one that came before anybody watched."""
