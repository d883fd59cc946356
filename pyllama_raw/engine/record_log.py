"""Records of what an engine did: a ring in memory, and a file on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pyllama_raw.engine.watcher import Watcher

MAX_RECORDS = 2**14  # kept by default

R = TypeVar("R")


class RecordLog(Watcher, Generic[R]):
    """The last records of one driver, the oldest first. Any thread may read."""

    def __init__(
        self,
        max_records: int = MAX_RECORDS,
        put: Callable[[R], None] | None = None,
    ) -> None:
        """
        Args:
            put: gets each record, too.
        """
        self._records: deque[R] = deque(maxlen=max_records)
        self._put = put

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._records))

    def keep(self, record: R) -> None:
        """Keep *record* in place of the oldest."""
        self._records.append(record)
        if self._put is not None:
            self._put(record)
