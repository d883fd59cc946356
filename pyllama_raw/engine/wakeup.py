"""
Waking readers in their event loops, without waiting and without losing the GIL.

Waking a loop is a system call, which gives the GIL away to the loop that was just woken;
the engine thread would get it back when all readers have run. So a thread of its own
does it, and only once the next decode begins: until then every call into C would be a
chance to lose the GIL, for up to sys.getswitchinterval() each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pyllama_raw.engine.stream import Stream


class Waker:
    """
    Wakes loops in the order of post().

    Args:
        lost: called with a loop that is closed; by the waker's thread.
    """

    def __init__(self, lost: Callable[[object], None]) -> None:
        self._lost = lost
        self._posted: list[tuple[object, Iterable[Stream]]] = []
        self._queue: SimpleQueue[tuple[object, Iterable[Stream]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="pyllama-waker", daemon=True)
        self._thread.start()

    def post(self, loop: object, streams: Iterable[Stream]) -> None:
        """Notify *streams*, all of *loop*, at flush(); they must not change afterwards."""
        self._posted.append((loop, streams))

    def flush(self) -> None:
        """Wake what was posted, soon."""
        posted, self._posted = self._posted, []
        for item in posted:
            self._queue.put(item)

    def close(self) -> None:
        """Wake what was posted, then end; waits for that."""
        self.flush()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            loop, streams = item
            if not wake(loop, streams):
                self._lost(loop)


def wake(loop: Any, streams: Iterable[Stream]) -> bool:
    """
    Notify *streams* inside *loop*; False if that loop is closed.

    Args:
        loop: an asyncio event loop or a TrioToken.
        streams: all of that loop that have new events; must not change afterwards.
    """
    post = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
    try:
        post(_notify, streams)
    except Exception:  # noqa: BLE001 - RuntimeError if it is closed; others await theirs
        return False
    return True


def _notify(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.notify()
