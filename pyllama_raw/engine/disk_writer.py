"""
Files are written, deleted and read by threads of their own, while steps go on.

One thread writes and deletes, in the order that was decided. Another one reads, because a
request waits for that, and a write may wait for the lock of the directory. States on their
way count against `max_bytes` of host memory, so those that come too fast are not even
copied.

The threads of libllama wait for each other many times in a step, so whoever takes a CPU
from one of them delays all running streams. Both therefore rest most of the time while others
compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from logging import getLogger
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING

from pyllama_raw.core.namespace import Adapted
from pyllama_raw.core.step import Fetched, Saved, Written
from pyllama_raw.engine.state_file import FileState, State, StoredFile

if TYPE_CHECKING:
    from pyllama_raw.engine.disk_store import DiskStore

Report = Callable[[Written | Fetched], None]

_log = getLogger(__name__)

REST = 16  # times as long as the work before it


class DiskWorker:
    """Does jobs in a thread of its own, from the first one on, until close()."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: Queue[Callable[[], None] | None] = Queue()
        self._thread: Thread | None = None

    def put(self, job: Callable[[], None]) -> None:
        """Have *job* done after those before; here and now if there is no thread."""
        if self._thread is None:
            # The first job starts the thread; most engines have no files.
            thread = Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has none to give
                self._do(job)
                return
            self._thread = thread
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all is done."""
        self._jobs.join()

    def close(self) -> None:
        """Do what is left and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            finally:
                del job  # and the state that it may hold
                self._jobs.task_done()

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # noqa: BLE001 - the file is a miss, and the log says so
            _log.exception("a file of the cache directory is left out")


class DiskWriter:
    """
    Reads from *store* and writes to it until close().

    Thread:
        The engine thread calls; `report` is called by it or by one of the workers.
    """

    def __init__(self, store: DiskStore) -> None:
        self.report: Report = lambda _: None  # until somebody wants to know
        self.others_compute = False  # as of the latest step; set by the engine thread
        self._store = store
        self._writes = DiskWorker("pyllama-disk")
        self._reads = DiskWorker("pyllama-read")

    def write(
        self,
        save_id: int,
        namespace: str | Adapted | None,
        tokens: bytes,
        state: State,
        capture_s: float = 0.0,
    ) -> None:
        """
        Write *state*, which must not change any more, and report the file or None.

        Args:
            capture_s: what it took to capture, which the report repeats.
        """
        self._writes.put(
            partial(self._write, save_id, namespace, tokens, [state], capture_s)
        )

    def fetch(self, fetch_id: int, file: StoredFile) -> None:
        """Report the state in *file*, verified; None if it is gone or damaged."""
        self._reads.put(partial(self._fetch, fetch_id, file))

    def delete(self, files: Iterable[StoredFile]) -> None:
        """Delete *files* before anything is written that was not yet handed over."""
        for file in files:
            self._writes.put(partial(self._store.delete, file))

    def drain(self) -> None:
        """Wait until all is written and read."""
        self._writes.drain()
        self._reads.drain()

    def close(self) -> None:
        """Write what is left and end the threads."""
        self.others_compute = False
        self._reads.close()
        self._writes.close()
        self._store.close()

    def _write(
        self,
        save_id: int,
        namespace: str | Adapted | None,
        tokens: bytes,
        states: list[State],
        capture_s: float,
    ) -> None:
        """*states* holds one; it is taken out, so that it can be freed here."""
        saved, state = None, states.pop()
        try:
            # It rests after each slice, so that steps have the CPU.
            file = self._store.write(namespace, tokens, state, self._rest)
            if file is not None:
                saved = Saved(file, file.counted_bytes - len(tokens), capture_s)
        finally:
            del state  # before its room is given back
            self.report(Written(save_id, saved))

    def _fetch(self, fetch_id: int, file: StoredFile) -> None:
        started, payload = time.perf_counter(), None
        try:
            # A request waits in its slot for this.
            state = self._store.read(file, self._rest)
            payload = None if state is None else FileState(state)
        finally:
            took_s = time.perf_counter() - started
            self.report(Fetched(fetch_id, payload, took_s))

    def _rest(self, worked_s: float) -> None:
        # A sixteenth of a CPU delays steps by as much, at most.
        if self.others_compute:
            time.sleep(REST * worked_s)
