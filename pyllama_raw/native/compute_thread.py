"""
The thread that computes: one a process, for the contexts of all engines.

Two threads that compute slow each other where there are few CPUs, also while one of them
is idle (`_ffi/step/runner.h` says why).
"""

from __future__ import annotations

import os
import weakref
from threading import Lock

from pyllama_raw.errors import ContextFailed
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import devices, ffi, last_error, lib


class ComputeThread(Handle):
    """
    Computes the steps of its contexts, in turn; they keep it alive.

    Raises:
        ContextFailed: the system gives no thread.
    """

    def __init__(self) -> None:
        pointer = lib.plr_thread_new()
        if pointer == ffi.NULL:
            raise ContextFailed("plr_thread_new", None, last_error())
        super().__init__(pointer, lib.plr_thread_free)
        self.pid = os.getpid()  # a fork has no such thread


_lock = Lock()
_shared: weakref.ref[ComputeThread] | None = None


def has_gpu() -> bool:
    """Whether a thread that computes mostly waits for a GPU."""
    return any(device.kind in ("gpu", "igpu") for device in devices())


def compute_thread() -> ComputeThread:
    """
    The one of this process, made anew if no context uses it.

    Where there is a GPU each context gets a thread of its own, which mostly waits for it.
    """
    global _shared  # noqa: PLW0603 - one a process
    if has_gpu():
        return ComputeThread()
    with _lock:
        thread = _shared() if _shared is not None else None
        if thread is None or thread.pid != os.getpid():
            thread = ComputeThread()
            _shared = weakref.ref(thread)
        return thread
