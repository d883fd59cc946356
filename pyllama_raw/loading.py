"""Loading a model without blocking the event loop, and giving it up when cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from pyllama_raw.config import EngineConfig
from pyllama_raw.engine.parts import EngineParts

Progress = Callable[[float], object]


async def load(
    model: str | Path | None, config: EngineConfig, progress: Progress | None
) -> EngineParts:
    """
    Build an engine in a worker thread; cancellation stops the loading itself.

    Raises:
        PyllamaError: whatever building failed with.
    """
    loading = _Loading(model, config, progress)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(loading.stop_if_cancelled)
            await to_thread.run_sync(loading.run)  # returns when loading has stopped
            group.cancel_scope.cancel()
        await checkpoint()
    except BaseException:
        loading.give_up()
        raise
    return loading.parts()


class _Loading:
    def __init__(
        self, model: str | Path | None, config: EngineConfig, progress: Progress | None
    ) -> None:
        self._model = model
        self._config = config
        self._progress = progress
        self._stopped = Event()
        self._outcome: EngineParts | BaseException | None = None

    def run(self) -> None:
        """Thread: a worker."""
        from pyllama_raw.engine.build import build

        try:
            path = _find(self._model)
            self._outcome = build(path, self._config, self._report)
        except Exception as error:  # noqa: BLE001 - raised by parts()
            self._outcome = error

    async def stop_if_cancelled(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._stopped.set()

    def parts(self) -> EngineParts:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def give_up(self) -> None:
        if isinstance(self._outcome, EngineParts):
            self._outcome.release()

    def _report(self, fraction: float) -> bool:
        """Whether to go on loading."""
        if self._progress is not None:
            self._progress(fraction)
        return not self._stopped.is_set()


def _find(model: str | Path | None) -> Path:
    from pyllama_raw import models

    return models.resolve_model(model)
