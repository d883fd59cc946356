"""Log lines of libllama, as lines of Python's log."""

from __future__ import annotations

import logging

from pyllama_raw.native import log as native

LEVELS = {
    native.DEBUG: logging.DEBUG,
    native.INFO: logging.INFO,
    native.WARN: logging.WARNING,
    native.ERROR: logging.ERROR,
}

_log = logging.getLogger("pyllama_raw.libllama")
_log.addHandler(logging.NullHandler())  # whoever sets up no logging is told nothing


def pass_on_lines() -> None:
    """Hand over what came since the last call; some levels may not be asked for."""
    for level, text in native.drain():
        _log.log(LEVELS.get(level, logging.INFO), "%s", text.strip())
