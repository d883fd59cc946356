"""Waking readers in their event loops, from the engine thread, without waiting."""

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
    except RuntimeError:  # asyncio: "Event loop is closed"; trio: RunFinishedError
        return False
    return True


def _notify(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.notify()
