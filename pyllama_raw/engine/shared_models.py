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
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyllama_raw.engine.model_files import ModelFile, model_files
from pyllama_raw.errors import ClosedError, ModelLoadFailed
from pyllama_raw.native.model import LoadProgress, Model

if TYPE_CHECKING:
    from pyllama_raw.engine.lease import Lease

T = TypeVar("T")
Report = Callable[[float], bool]  # gets the loaded fraction; False: do not go on
POLL_S = 0.05  # between two reports


class Shared(Generic[T]):
    """
    Values that a process makes once for all who want the same, by their keys. Thread: any.

    A fork finds none of them, because no thread of its own loads or encodes, and nobody there
    lets go of a lock.
    """

    def __init__(self) -> None:
        self._users = Counter[T]()
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self.lock = RLock()  # a finaliser can leave where it is held
        self._values: dict[object, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def enter(self, key: object, make: Callable[[], T]) -> T:
        """Use the value of *key*, which *make* makes while others wait, if there is none."""
        with self.lock:
            value = self._values[key] if key in self._values else make()
            self._values[key] = value
            self._users[value] += 1
            return value

    def share(self, value: T) -> None:
        """Another one uses *value*."""
        with self.lock:
            self._users[value] += 1

    def leave(self, value: T) -> bool:
        """One user leaves; True: the last one, who is to free *value*."""
        with self.lock:
            self._users[value] -= 1
            if self._users[value] > 0:
                return False
            del self._users[value]
            self.forget(value)
            return True

    def forget(self, value: T) -> None:
        """Whoever comes from now on makes another one."""
        with self.lock:
            self._values = {k: v for k, v in self._values.items() if v is not value}


class ModelUse:
    """One user of a model, who is counted already, until close()."""

    def __init__(self, loading: _Loading) -> None:
        self._loading: _Loading | None = loading

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
        return self._loading is None

    def share(self) -> ModelUse:
        """Another user of the same model. Raises ClosedError after close()."""
        with _models.lock:
            loading = self._open
            _models.share(loading)
            return ModelUse(loading)

    def close(self) -> None:
        """Leave; the last one frees the model. Idempotent."""
        with _models.lock:
            loading, self._loading = self._loading, None
        # The last one frees it, outside of the lock, because that takes long.
        if loading is not None and _models.leave(loading):
            loading.end()

    @property
    def _open(self) -> _Loading:
        if self._loading is None:
            raise ClosedError("the model is closed: open it again")
        return self._loading


class _Loading:
    """A model that is loaded, or being loaded by a thread of its own."""

    def __init__(
        self, path: Path, files: tuple[ModelFile, ...], options: Mapping[str, Any]
    ) -> None:
        self.files = files
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
        # The caller may give up between two looks. Others may go on waiting for the same load.
        while not self._done.wait(POLL_S):
            if report(self._progress.fraction) is False:
                reason = "cancelled by the progress function"
                raise ModelLoadFailed(str(self._path), reason)
        # All that have waited are told, each by an error of its own.
        if self._error is not None:
            error = copy(self._error)  # each user that waits raises one of its own
            raise error.with_traceback(self._error.__traceback__)
        report(1.0)

    def end(self) -> None:
        """Nobody uses it any more."""
        # A load that nobody waits for stops.
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
                from pyllama_raw.engine.lease import take_lease  # and pydantic

                self._lease = take_lease(self._options)
            self._model = Model.load(self._path, progress=self._progress, **options)
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._give_back()
            self._error = error
            _models.forget(self)  # the next one tries again
        self._done.set()


_models = Shared[_Loading]()


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
    # Equal files and equal options are one model. A path stands for files that cannot be read.
    key = files or str(path), repr(sorted(options.items()))  # repr: True is not 1
    loading = _models.enter(key, partial(_Loading, path, files, options))
    use = ModelUse(loading)
    try:
        loading.wait(report)
    except BaseException:
        use.close()
        raise
    return use
