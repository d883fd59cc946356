"""Loading a model without blocking the event loop, and giving it up when cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from pyllama_raw.prompt import PromptEncoder

if TYPE_CHECKING:
    from pyllama_raw.config import EngineConfig
    from pyllama_raw.engine.parts import EngineParts

Progress = Callable[[float], object]


async def load(
    model: str | Path | None, config: EngineConfig | None, progress: Progress | None
) -> tuple[EngineParts, PromptEncoder]:
    """
    Build an engine in a worker thread; cancellation stops the loading itself.

    Raises:
        PyllamaError: whatever building failed with.
        BaseException: whatever *progress* raised, as it is.
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
    return loading.result()


class _Loading:
    def __init__(
        self,
        model: str | Path | None,
        config: EngineConfig | None,
        progress: Progress | None,
    ) -> None:
        self._model = model
        self._config = config
        self._progress = progress
        self._stopped = Event()
        self._parts: EngineParts | None = None
        self._encoder: PromptEncoder | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Thread: a worker."""
        from pyllama_raw.engine.opening import build

        try:
            path = _find(self._model)
            self._parts = build(path, self._config, self._report)
            self._encoder = PromptEncoder.of(self._parts)
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._error = error

    async def stop_if_cancelled(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._stopped.set()

    def result(self) -> tuple[EngineParts, PromptEncoder]:
        if self._error is not None:
            self.give_up()
            raise self._error
        assert self._parts is not None
        assert self._encoder is not None
        return self._parts, self._encoder

    def give_up(self) -> None:
        if self._parts is not None:
            self._parts.release()

    def _report(self, fraction: float) -> bool:
        """Whether to go on loading."""
        if self._progress is not None:
            self._progress(fraction)
        return not self._stopped.is_set()


def _find(model: str | Path | None) -> Path:
    from pyllama_raw import models

    return models.resolve_model(model)
