"""A budget of restarts: so many in a minute, then no more."""

from __future__ import annotations

from collections import deque
from logging import getLogger

WINDOW_S = 60.0
RETRY_S = 1.0  # between two tries of one restart

_log = getLogger(__name__)


class Restarts:
    """The restarts of an engine, whatever had to be made anew. Each is told in the log."""

    def __init__(self, most: int = 0) -> None:
        self.most = most  # in WINDOW_S
        self._moments = deque[float]()

    def take(self, now: float, error: BaseException) -> bool:
        """Whether the engine may restart after *error*, which is noted."""
        while self._moments and self._moments[0] <= now - WINDOW_S:
            self._moments.popleft()
        if len(self._moments) >= self.most:
            return False
        self._moments.append(now)
        _log.error(
            "the engine failed, restart %d of at most %d in %g s: %r",
            len(self._moments),
            self.most,
            WINDOW_S,
            error,
        )
        return True
