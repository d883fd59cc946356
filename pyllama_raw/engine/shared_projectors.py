"""Projectors that engines share: a process loads each once for a model."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import Any

from pyllama_raw.engine.model_files import model_files
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector

_lock = Lock()
_users: dict[Projector, tuple[object, int]] = {}  # its key, and how many use it


def open_projector(path: str | Path, model: Model, **options: Any) -> Projector:
    """
    The projector at *path* for *model*; give it back to close_projector().

    It waits while another one is loaded.

    Args:
        options: of Projector.load().

    Raises:
        ModelLoadFailed, ProjectorLoadFailed, Unsupported: as Projector.load().
    """
    with _lock:
        files = model_files(Path(path)) or str(path)
        wanted = id(model), files, repr(sorted(options.items()))
        for projector, (key, n_users) in _users.items():
            if key == wanted:
                _users[projector] = key, n_users + 1
                return projector
        projector = Projector.load(path, model, **options)
        _users[projector] = wanted, 1
        return projector


def close_projector(projector: Projector) -> None:
    """One user leaves; the last one frees it."""
    with _lock:
        key, n_users = _users.get(projector, (None, 1))
        if n_users > 1:
            _users[projector] = key, n_users - 1
            return
        _users.pop(projector, None)
    projector.close()


def _begin_anew() -> None:
    """A fork has no thread that encodes, and nobody who lets go of a lock."""
    global _lock  # noqa: PLW0603 - one a process
    _lock = Lock()
    _users.clear()


os.register_at_fork(after_in_child=_begin_anew)
