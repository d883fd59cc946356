"""
Log lines of llama.cpp: kept by the shim in a ring, read here when somebody asks.

No Python runs inside a log callback. Debug lines are not kept.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from pyllama_raw.native.libllama import ffi, last_error, lib

DEBUG, INFO, WARN, ERROR = 1, 2, 3, 4  # ggml.h: enum ggml_log_level

_MAX_LINES = 1024
_BUFFER_BYTES = 128 * 1024  # more than the ring holds
_lock = threading.Lock()
_lines: deque[LogLine] = deque(maxlen=_MAX_LINES)
_errors: deque[tuple[int, str]] = deque(maxlen=64)  # serial number, text
_n_read = 0


class LogLine(NamedTuple):
    """One line, without its newline."""

    level: int  # DEBUG, INFO, WARN or ERROR
    text: str


def drain() -> list[LogLine]:
    """Take all lines since the last call; the oldest beyond 1024 are gone."""
    with _lock:
        _read()
        lines = list(_lines)
        _lines.clear()
    return lines


def mark() -> int:
    """A moment in the log, for last_errors()."""
    with _lock:
        _read()
        return _n_read


def last_errors(since: int = 0, limit: int = 4) -> str:
    """The latest *limit* warnings and errors after mark *since*, in order, as one line."""
    with _lock:
        _read()
        recent = [text for serial, text in _errors if serial > since]
    return "; ".join(recent[-limit:])


def reason(since: int) -> str:
    """The cause of a failure after mark *since*: an exception of this thread, or the log."""
    return last_error() or last_errors(since) or "llama.cpp gave no reason"


def _read() -> None:
    """Move what the ring holds into _lines and _errors."""
    global _n_read  # noqa: PLW0603 -- one ring a process
    buffer = ffi.new("char[]", _BUFFER_BYTES)
    n_bytes = lib.plr_log_drain(buffer, _BUFFER_BYTES)
    for record in bytes(ffi.buffer(buffer, n_bytes)).split(b"\0"):
        # A record is a level byte and text; after level NONE (0) the split left only text.
        level = record[0] if record and record[0] < 8 else INFO
        text = record[1:] if record and record[0] < 8 else record
        for line in text.decode("utf-8", "replace").splitlines():
            if line.strip():
                _n_read += 1
                _lines.append(LogLine(level, line))
                # Failures are explained by these, long after a program has read its lines.
                if level in (WARN, ERROR):
                    _errors.append((_n_read, line.strip()))
