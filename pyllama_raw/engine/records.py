"""Records: kept in memory, and as JSON lines, written at once or while an engine runs."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from fcntl import LOCK_EX, LOCK_NB, flock
from logging import getLogger
from pathlib import Path
from stat import S_ISREG
from threading import Event, Thread
from typing import IO, Any, Generic, NamedTuple, TypeVar

from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import ConfigError

MAX_RECORDS = 2**14  # kept by default
MAX_WAITING = 2**16  # records that wait for the disk; then the oldest are lost
WRITE_S = 1.0  # between two looks at them

R = TypeVar("R", bound=NamedTuple)

_log = getLogger(__name__)


def write_records(path: Path, records: Iterable[NamedTuple]) -> None:
    """One JSON object a line."""
    with path.open("w") as file:
        file.writelines(map(line_of, records))


def line_of(record: NamedTuple) -> str:
    """*record* as a line of JSON."""
    return json.dumps(record._asdict()) + "\n"


def read_records(path: Path, make: Callable[..., R]) -> list[R]:
    """
    Read records that were written, as *make* makes them; lists become tuples.

    Raises:
        ValueError: a line is no record.
    """
    found = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                values = json.loads(line).items()
                found.append(make(**{name: _fixed(value) for name, value in values}))
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return found


def _fixed(value: Any) -> Any:
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


class RecordLog(Watcher, Generic[R]):
    """
    The last records of one driver, the oldest first. Any thread may read.

    Args:
        put: gets each record, too.
    """

    def __init__(
        self, max_records: int = MAX_RECORDS, put: Callable[[R], None] | None = None
    ) -> None:
        self._records: deque[R] = deque(maxlen=max_records)
        self._put = put

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._records))

    def keep(self, record: R) -> None:
        """Keep *record* in place of the oldest."""
        self._records.append(record)
        if self._put is not None:
            self._put(record)


class RecordFile:
    """
    JSON lines that a thread writes while an engine runs.

    Nobody waits for the disk. A file that cannot be written any more is told in the log, and
    the engine goes on. A lock keeps others from writing to the same file.

    A file that is there is emptied only if it begins like records of the same kind: any other
    file may be all that somebody has of it, or be mapped as the model.
    """

    def __init__(self, path: Path, kind: type[NamedTuple]) -> None:
        """
        Args:
            kind: of the records.

        Raises:
            ConfigError: *path* cannot be written, is no file for this log, or another log
                writes to it.
        """
        self.n_lost = 0
        self._path = path
        self._waiting: deque[NamedTuple] = deque(maxlen=MAX_WAITING)
        self._closes = Event()
        try:
            file = _open_alone(path, f'{{"{kind._fields[0]}": '.encode())
        except BlockingIOError as error:
            raise ConfigError(
                f"{path} belongs to another log that is open: name another file"
            ) from error
        except (OSError, ValueError) as error:  # a ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path} cannot be written: {reason}") from error
        self._thread = Thread(
            target=self._run, args=(file,), name="pyllama-log", daemon=True
        )
        self._thread.start()

    def put(self, record: NamedTuple) -> None:
        """Have *record* written soon. Thread: one."""
        self.n_lost += len(self._waiting) == MAX_WAITING
        self._waiting.append(record)

    def close(self) -> None:
        """Write the rest; can be repeated."""
        self._closes.set()
        self._thread.join()

    def _run(self, file: IO[str]) -> None:
        try:
            with file:
                is_last = False
                while not is_last:
                    is_last = self._closes.wait(WRITE_S)
                    while self._waiting:  # each is gone once it is written
                        file.write(line_of(self._waiting.popleft()))
                    file.flush()
        except Exception as error:  # noqa: BLE001 - it is told in the log
            _log.error("%s is not written any more: %s", self._path, error)
        if self.n_lost:
            _log.error("%s lacks %d records", self._path, self.n_lost)


def _open_alone(path: Path, start: bytes) -> IO[str]:
    """
    An empty file at *path*, which its user alone may read, locked as long as it is open.

    Args:
        start: how every file begins that may be emptied.

    Raises:
        BlockingIOError: another one is open.
        ConfigError: there is something else.
    """
    # O_NONBLOCK: a pipe without a reader would keep the caller waiting.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o600), "a", encoding="utf-8")
    try:
        flock(file, LOCK_EX | LOCK_NB)
        _check(file.fileno(), path, start)
        file.truncate(0)
    except BaseException:
        file.close()
        raise
    return file


def _check(file: int, path: Path, start: bytes) -> None:
    if not S_ISREG(os.fstat(file).st_mode):
        raise ConfigError(f"{path} is no regular file: name a file for the log")
    found = os.pread(file, len(start), 0)
    if found != start[: len(found)]:
        raise ConfigError(
            f"{path} has something else than such a log, it begins with {found!r}: "
            "name another file, or delete it"
        )
