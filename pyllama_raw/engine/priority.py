"""Threads that do not interrupt those that compute."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def wait_for_turn() -> None:
    """
    Let the calling thread, when it wakes up, wait until a CPU is free or its turn comes.

    Linux otherwise often gives it the CPU of who woke it: libllama's first thread, which
    is about to begin the next decode. Nothing happens elsewhere, where it is forbidden,
    and to a thread that was given another policy.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
