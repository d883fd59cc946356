"""What an engine writes down of its steps and requests: in memory, in files, or nowhere."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Those of the driver."""
        return tuple(log for log in (self.steps, self.requests) if log is not None)

    def close(self) -> None:
        """Write what is to go to files; no step may follow."""
        for file in self.files:
            file.close()


NO_LOGS = Logs()


def open_logs(config: LogConfig) -> Logs:
    """
    The logs that *config* asks for.

    Raises:
        ConfigError: a file cannot be written.
    """
    steps = requests = None
    with ExitStack() as opened:
        files: list[RecordFile] = []
        if config.step_log is not None:
            step_file = RecordFile(Path(config.step_log), StepRecord)
            opened.callback(step_file.close)
            steps = StepLog(config.max_steps, step_file.put)
            files.append(step_file)
        elif config.max_steps:
            steps = StepLog(config.max_steps)
        if config.request_log is not None:
            path = Path(config.request_log)
            request_file = RecordFile(path, RequestRecord)
            requests = RequestLog(config.max_requests, request_file.put)
            files.append(request_file)
        elif config.max_requests:
            requests = RequestLog(config.max_requests)
        opened.pop_all()
    return Logs(steps, requests, tuple(files))
