"""
Models that engines share: a process loads each once.

Rules:
1. Two are the same if their files are, unchanged, and their options are equal.
2. A user that comes while a model loads waits for it. One that leaves does not disturb the
   others; the loading stops when all have left.
3. The weights are freed when the last user leaves. Any thread may come and leave.
4. The lease of devices is taken before the load, and given back after all else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, Any

from pyllama_raw.engine.model_files import ModelFile, model_files
from pyllama_raw.errors import ClosedError, ModelLoadFailed
from pyllama_raw.native.model import LoadProgress, Model

if TYPE_CHECKING:
    from pyllama_raw.engine.lease import Lease

Report = Callable[[float], bool]  # gets the loaded fraction; False: do not go on

POLL_S = 0.05  # between two reports


class ModelUse:
    """One user of a shared model, until close()."""

    def __init__(self, shared: _Shared) -> None:
        """With the lock."""
        shared.n_users += 1
        self._shared: _Shared | None = shared

    @property
    def model(self) -> Model:
        """Raises ClosedError after close()."""
        return self._open.loaded

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """Files of the model, as they were before it was loaded."""
        return self._open.files

    @property
    def closed(self) -> bool:
        return self._shared is None

    def share(self) -> ModelUse:
        """Another user of the same model. Raises ClosedError after close()."""
        with _lock:
            return ModelUse(self._open)

    def close(self) -> None:
        """Leave; the last one frees the model. Idempotent."""
        with _lock:
            shared, self._shared = self._shared, None
            if shared is None:
                return
            shared.n_users -= 1
            is_last = shared.n_users == 0
            if is_last and shared in _models:
                _models.remove(shared)
        if is_last:
            shared.end()

    @property
    def _open(self) -> _Shared:
        if self._shared is None:
            raise ClosedError("the model is closed: open it again")
        return self._shared


class _Shared:
    """A model that is loaded, or being loaded by a thread of its own."""

    def __init__(
        self,
        key: object,
        path: Path,
        files: tuple[ModelFile, ...],
        options: Mapping[str, Any],
    ) -> None:
        self.key = key
        self.files = files
        self.n_users = 0
        self._path, self._options = path, options
        self._lease: Lease | None = None
        self._progress = LoadProgress()
        self._model: Model | None = None
        self._error: BaseException | None = None
        self._done = Event()
        self._thread = Thread(target=self._load, name="pyllama-model")
        self._thread.start()

    @property
    def loaded(self) -> Model:
        assert self._model is not None
        return self._model

    def wait(self, report: Report) -> None:
        """Until the model is loaded; raises why it could not be, or what *report* does."""
        while not self._done.wait(POLL_S):
            if report(self._progress.fraction) is False:
                said = "cancelled by the progress function"
                raise ModelLoadFailed(str(self._path), said)
        if self._error is not None:
            error = copy(self._error)  # each user that waits raises one of its own
            raise error.with_traceback(self._error.__traceback__)
        report(1.0)

    def end(self) -> None:
        """Nobody uses it any more."""
        self._progress.cancel()
        self._thread.join()
        try:
            if self._model is not None:
                self._model.close()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def _load(self) -> None:
        options = {**self._options}
        try:
            if options.pop("lease", None) is not None:
                from pyllama_raw.engine.lease import take_lease

                self._lease = take_lease(self._options)
            self._model = Model.load(self._path, progress=self._progress, **options)
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._give_back()
            self._error = error
            with _lock:
                if self in _models:  # the next one tries again
                    _models.remove(self)
        self._done.set()


_lock = RLock()  # a finaliser can close where the lock is held
_models: list[_Shared] = []


def open_model(
    path: Path, options: Mapping[str, Any], report: Report = lambda _: True
) -> ModelUse:
    """
    A user of the model at *path*; blocks while it loads.

    Args:
        options: fields of ModelConfig, those that are not the default.
        report: called in this thread about every 50 ms.

    Raises:
        ModelLoadFailed, ConfigError: as Model.load().
        LeaseRefused: there is no slot for it.
    """
    files = model_files(path)
    key = files or str(path), repr(sorted(options.items()))  # repr: True is not 1
    with _lock:
        found = next((model for model in tuple(_models) if model.key == key), None)
        shared = found or _Shared(key, path, files, options)
        use = ModelUse(shared)
        if found is None:
            _models.append(shared)
    try:
        shared.wait(report)
    except BaseException:
        use.close()
        raise
    return use


def _begin_anew() -> None:
    """A fork has no thread that loads, and nobody who lets go of a lock."""
    global _lock  # noqa: PLW0603 - one a process
    _lock = RLock()
    _models.clear()


os.register_at_fork(after_in_child=_begin_anew)
