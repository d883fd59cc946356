"""Logs that an engine keeps of its steps and requests: in memory, in files, or nowhere."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pyllama_raw.engine.records import RecordFile
from pyllama_raw.engine.request_log import RequestLog, RequestRecord
from pyllama_raw.engine.step_log import StepLog
from pyllama_raw.engine.watcher import StepRecord, Watcher

if TYPE_CHECKING:
    from pyllama_raw.options.config import LogConfig


@dataclass(frozen=True, slots=True)
class Logs:
    """Each None if nobody asked for it."""

    steps: StepLog | None = None
    requests: RequestLog | None = None
    files: tuple[RecordFile, ...] = ()
    _users: list[int] = field(default_factory=lambda: [1], compare=False)

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Logs that the driver tells of steps and requests."""
        return tuple(log for log in (self.steps, self.requests) if log is not None)

    def share(self) -> Self | None:
        """The same logs, for parts that go on with them and close them, too; None: too late."""
        with _lock:
            is_open = self._users[0] > 0
            self._users[0] += is_open
        return self if is_open else None

    def close(self) -> None:
        """No step of one engine may follow; the last one writes what is to go to files."""
        with _lock:
            self._users[0] -= 1
            is_last = self._users[0] <= 0
        for file in self.files if is_last else ():
            file.close()


_lock = Lock()
NO_LOGS = Logs()


def open_logs(config: LogConfig) -> Logs:
    """
    The logs that *config* asks for.

    Raises:
        ConfigError: a file cannot be written.
    """
    files: list[RecordFile] = []
    with ExitStack() as opened:

        def put(path: str | Path | None, kind: type[NamedTuple]) -> Any:
            """Open a file, if one is asked for."""
            if path is None:
                return None
            files.append(RecordFile(Path(path), kind))
            opened.callback(files[-1].close)
            return files[-1].put

        put_step = put(config.step_log, StepRecord)
        put_request = put(config.request_log, RequestRecord)
        opened.pop_all()
    keeps_steps = config.max_steps or put_step
    keeps_requests = config.max_requests or put_request
    return Logs(
        StepLog(config.max_steps, put_step) if keeps_steps else None,
        RequestLog(config.max_requests, put_request) if keeps_requests else None,
        tuple(files),
    )
