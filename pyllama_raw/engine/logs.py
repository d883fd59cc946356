"""Logs that an engine keeps of its steps and requests: in memory, in files, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pyllama_raw.engine.records import RecordFile
from pyllama_raw.engine.request_log import RequestLog, RequestRecord
from pyllama_raw.engine.step_log import StepLog
from pyllama_raw.engine.watcher import StepRecord, Watcher

if TYPE_CHECKING:
    from pyllama_raw.options.config import LogConfig


class Logs:
    """Each None if nobody asked for it; *close_files* is called by the last one who closes."""

    def __init__(
        self,
        steps: StepLog | None = None,
        requests: RequestLog | None = None,
        close_files: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps, self.requests, self._close_files = steps, requests, close_files
        self._n_users, self._lock = 1, Lock()

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Logs that the driver tells of steps and requests."""
        return tuple(log for log in (self.steps, self.requests) if log is not None)

    def share(self) -> Self | None:
        """The same logs, for parts that go on with them and close them, too; None: too late."""
        with self._lock:
            is_open = self._n_users > 0
            self._n_users += is_open
        return self if is_open else None

    def close(self) -> None:
        """No step of one engine may follow; the last one writes what is to go to files."""
        with self._lock:
            self._n_users -= 1
            is_last = self._n_users <= 0
        if is_last:
            self._close_files()


NO_LOGS = Logs()


def open_logs(config: LogConfig) -> Logs:
    """
    The logs that *config* asks for.

    Raises:
        ConfigError: a file cannot be written.
    """
    with ExitStack() as opened:

        def put(path: str | Path | None, kind: type[NamedTuple]) -> Any:
            """Open a file, if one is asked for."""
            if path is None:
                return None
            file = RecordFile(Path(path), kind)
            opened.callback(file.close)
            return file.put

        put_step = put(config.step_log, StepRecord)
        put_request = put(config.request_log, RequestRecord)
        close_files = opened.pop_all().close
    keeps_steps = config.max_steps or put_step
    keeps_requests = config.max_requests or put_request
    return Logs(
        StepLog(config.max_steps, put_step) if keeps_steps else None,
        RequestLog(config.max_requests, put_request) if keeps_requests else None,
        close_files,
    )
