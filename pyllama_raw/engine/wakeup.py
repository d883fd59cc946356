"""
Waking readers in their event loops, without waiting for them.

To wake a loop is a system call, in which the engine thread gives the GIL away. Usually the
next step is being computed meanwhile (ARCHITECTURE.md, Steps ahead).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyllama_raw.engine.stream import Stream


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
