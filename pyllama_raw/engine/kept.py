"""Things that outlive the parts of an engine, because the next parts go on with them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING

from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.engine.logs import Logs
from pyllama_raw.engine.model_files import ModelFile
from pyllama_raw.engine.span_keys import SpanKeys

if TYPE_CHECKING:
    from pyllama_raw.options.config import EngineConfig, LogConfig

WINDOW_S = 60.0
RETRY_S = 1.0  # between two tries of one restart

_log = getLogger(__name__)


class Restarts:
    """
    A budget of restarts: so many in a minute, then no more, whatever had to be made anew.

    Each is told in the log.
    """

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
        text = "the engine failed, restart %d of at most %d in %g s: %r"
        _log.error(text, len(self._moments), self.most, WINDOW_S, error)
        return True


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """
    The memory of an engine without requests, whose context and weights are freed.

    The scheduler knows what idle slots hold, which is in `state`, and the snapshots and files.
    """

    scheduler: Scheduler
    state: object  # as EngineExecutor.suspend() gives it
    span_keys: SpanKeys  # of the prompts that the scheduler knows
    files: tuple[ModelFile, ...]  # of the model
    config: EngineConfig

    def fits(self, files: tuple[ModelFile, ...], config: EngineConfig) -> bool:
        """Whether a context of a model of *files* is what this one was."""
        return bool(files) and files == self.files and config == self.config


@dataclass(frozen=True, slots=True)
class Kept:
    """Things that the next parts of an engine have of earlier ones."""

    logs: Logs
    log_config: LogConfig | None
    memory: KeptMemory | None = None
    restarts: Restarts | None = None  # that count for the next parts, too
