"""
Encodes the images and sounds of requests, in a thread of its own that mostly waits.

The compute thread does the work, between steps. `core/encodes.py` says which encode is next
and what is kept; everything here only connects the two.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic
from typing import Protocol, TypeAlias

from pyllama_raw.core.encodes import Encodes, RowNeed
from pyllama_raw.core.stats import MediaStats
from pyllama_raw.errors import BadMedia, EngineFault, PyllamaError

Rows: TypeAlias = "array[float]"


class Cancellable(Protocol):
    """An encode that runs."""

    def cancel(self) -> None:
        """End it soon; safe to call too late."""


class Task(Protocol):
    """An image or a sound of a request."""

    @property
    def need(self) -> RowNeed:
        """Its key and its bytes."""

    def control(self) -> Cancellable:
        """For encode()."""

    def encode(self, control: Cancellable) -> Rows | None:
        """Its rows; None if it was cancelled. Takes long."""


@dataclass(slots=True, eq=False)
class RequestEncodes:
    """The encodes of a request, from enter() to leave()."""

    request_id: int
    tasks: Sequence[Task]
    error: PyllamaError | None = None  # of the first encode that failed
    seconds: float = 0.0


class Encoder:
    """
    The encodes of one engine.

    Args:
        report: called with the id of a request when all its rows are there, or one of its
            encodes has failed; with the lock, so it must not wait.

    Thread:
        Any, until close().
    """

    def __init__(
        self,
        encodes: Encodes[RequestEncodes],
        report: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.report = report
        self._encodes = encodes
        self._control: Cancellable | None = None  # of the encode that runs
        self._n_failed = self._n_cancelled = 0
        self._encode_s = 0.0
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="pyllama-encoder", daemon=True)
        self._thread.start()

    def enter(self, requests: Sequence[RequestEncodes]) -> None:
        """
        Encode the tasks of all *requests* or of none.

        Raises:
            QueueFull, InvalidRequest: there is too much of them.
        """
        with self._changed:
            try:
                for request in requests:
                    self._encodes.add(request, [task.need for task in request.tasks])
            except BaseException:
                for request in requests:
                    self.leave(request)
                raise
            self._changed.notify_all()

    def is_done(self, encodes: RequestEncodes) -> bool:
        """Whether all rows of a request are there; never, if one of them failed."""
        with self._changed:
            return self._encodes.is_done(encodes)

    def rows(self, task: Task) -> Rows:
        """Rows that encode() gave of *task*, whose request is open."""
        with self._changed:
            return self._encodes.rows(task.need.key)

    def leave(self, encodes: RequestEncodes) -> None:
        """Forget *encodes*, because their request has ended; can be repeated."""
        with self._changed:
            # The image that is being encoded was wanted by this request alone.
            if self._encodes.leave(encodes):
                self._cancel()

    def clear(self, salt: str | None) -> int:
        """Drop the rows of *salt*, None: all; returns the bytes freed at once."""
        with self._changed:
            return self._encodes.clear(salt)

    @property
    def stats(self) -> MediaStats:
        with self._changed:
            encodes = self._encodes
            return MediaStats(
                encodes=encodes.n_encoded,
                encodes_shared=encodes.n_shared,
                encodes_failed=self._n_failed,
                encodes_cancelled=self._n_cancelled,
                encode_s=self._encode_s,
                media_bytes=encodes.n_bytes,
                row_bytes=encodes.n_kept_bytes,
            )

    def close(self) -> None:
        """Cancel the encode that runs, and wait for it: one layer."""
        with self._changed:
            # The thread sees this once the layer that is computed is done.
            self._closed = True
            self._cancel()
            self._changed.notify_all()
        self._thread.join()

    def _cancel(self) -> None:
        if self._control is not None:
            self._control.cancel()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                # Whose turn it is: requests take turns, an image each.
                turn = self._encodes.begin()
                # Nothing is to be encoded.
                if turn is None:
                    self._changed.wait()
                else:
                    encodes, index = turn
                    self._encode(encodes.tasks[index])

    def _encode(self, task: Task) -> None:
        """With the lock, but while it is computed."""
        try:
            # While the encode runs, others may cancel it by this.
            self._control = control = task.control()
        except BaseException as caught:  # noqa: BLE001 - the reader is told
            self._fail(task, _fault(caught))
            return
        # The lock is given away for the encode alone.
        start = monotonic()
        rows: Rows | None = None
        error: PyllamaError | None = None
        # Requests come and leave while it is computed.
        self._changed.release()
        try:
            rows = task.encode(control)
        except PyllamaError as caught:
            error = _own(caught)
        except BaseException as caught:  # noqa: BLE001 - the reader is told
            error = _fault(caught)
        self._changed.acquire()
        self._control = None
        seconds = monotonic() - start
        self._encode_s += seconds
        # All that share the image have waited for it.
        for encodes in self._encodes.users(task.need.key):
            encodes.seconds += seconds
        if error is not None:
            self._fail(task, error)
        # The last one that wanted it has left.
        elif rows is None:
            self._n_cancelled += 1
            self._encodes.drop()
        else:
            # Requests that have all their rows now can start.
            for encodes in self._encodes.done(rows):
                self.report(encodes.request_id)

    def _fail(self, task: Task, error: PyllamaError) -> None:
        self._n_failed += 1
        for failed in self._encodes.fail():
            # Each request is told by the index of the image in its own prompt.
            keys = [failed_task.need.key for failed_task in failed.tasks]
            failed.error = _own(error, keys.index(task.need.key))
            self.report(failed.request_id)


def _own(error: PyllamaError, index: int | None = None) -> PyllamaError:
    """
    *error* for one of the requests that it fails: each raises an object of its own.

    It has no traceback and no cause, because their frames hold what was decoded.
    """
    return BadMedia(error.reason, index) if type(error) is BadMedia else copy(error)


def _fault(error: BaseException) -> EngineFault:
    return EngineFault(f"an encode failed, the engine goes on: {error!r}")
