"""
Files are written and deleted by a thread of their own, in the order they were decided.

The engine thread copies a state out of the context and hands it over; it never waits for
the disk. States on their way count against `max_bytes` of host memory, so those that come
too fast are not even copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from queue import Queue
from threading import Thread

from pyllama_raw.core.step import Captured
from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.state_file import State, StoredFile


class DiskWriter:
    """
    Writes to *store* until close().

    Thread:
        The engine thread calls; `report` is called by it or by the writer.
    """

    def __init__(self, store: DiskStore) -> None:
        self.report: Callable[[int, Captured | None], None] = _ignore
        self.error: Exception | None = None  # the latest nobody expected
        self._store = store
        self._jobs: Queue[Callable[[], None] | None] = Queue()
        self._thread: Thread | None = None  # from the first job on

    def write(
        self, write_id: int, namespace: str | None, tokens: bytes, state: State
    ) -> None:
        """Write *state*, which must not change any more, and report the file or None."""
        self._put(partial(self._write, write_id, namespace, tokens, [state]))

    def read(self, file: StoredFile) -> State | None:
        """The state in *file*, verified; None if it is gone or damaged."""
        return self._store.read(file)

    def delete(self, files: Iterable[StoredFile]) -> None:
        """Delete *files* before anything is written that was not yet handed over."""
        for file in files:
            self._put(partial(self._store.delete, file))

    def drain(self) -> None:
        """Wait until all is written."""
        self._jobs.join()

    def close(self) -> None:
        """Write what is left and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None and not self._start():
            self._do(job)
        else:
            self._jobs.put(job)

    def _start(self) -> bool:
        """Start the thread; False if the system has none to give."""
        thread = Thread(target=self._run, name="pyllama-disk", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            finally:
                self._jobs.task_done()

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - the file is a miss
            self.error = error

    def _write(
        self, write_id: int, namespace: str | None, tokens: bytes, states: list[State]
    ) -> None:
        """*states* holds one; it is taken out, so that it can be freed here."""
        written, state = None, states.pop()
        try:
            file = self._store.write(namespace, tokens, state)
            if file is not None:
                written = Captured(file, file.n_bytes - len(tokens))
        finally:
            del state  # before its room is given back
            self.report(write_id, written)


def _ignore(_write_id: int, _written: Captured | None) -> None:
    """Until somebody wants to know."""
