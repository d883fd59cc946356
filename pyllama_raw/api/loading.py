"""Loading a model without blocking the event loop, and giving it up when cancelled."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from threading import Event
from typing import Any, Generic, Protocol, TypeVar

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

Progress = Callable[[float], object]
Report = Callable[[float], bool]


class Closing(Protocol):
    """An object that is closed when its block ends."""

    async def aclose(self) -> None:
        """Free what was opened."""


T = TypeVar("T")
C = TypeVar("C", bound=Closing)


class Opening(Generic[C]):
    """An object to be opened, by `async with`, which closes it, or by `await`."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, C]]) -> None:
        self._make = make
        self._made: C | None = None

    def __await__(self) -> Generator[Any, None, C]:
        return self._make().__await__()

    async def __aenter__(self) -> C:
        self._made = await self
        return self._made

    async def __aexit__(self, *_: object) -> None:
        if self._made is not None:
            await self._made.aclose()


async def load(
    make: Callable[[Report], T],
    progress: Progress | None,
    give_up: Callable[[T], object],
) -> T:
    """
    Return what *make* makes in a worker thread; cancellation stops the loading itself.

    Args:
        make: gets a function for the loaded fraction, which says whether to go on.
        give_up: frees what was made too late.

    Raises:
        PyllamaError: whatever *make* failed with.
        BaseException: whatever *progress* raised, as it is.
    """
    loading = _Loading(make, progress)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(loading.stop_if_cancelled)
            await to_thread.run_sync(loading.run)  # returns when loading has stopped
            group.cancel_scope.cancel()
        await checkpoint()
    except BaseException:
        for made in loading.made:
            give_up(made)
        raise
    return loading.result()


class _Loading(Generic[T]):
    def __init__(self, make: Callable[[Report], T], progress: Progress | None) -> None:
        self.made: list[T] = []  # one, or none yet
        self._make = make
        self._progress = progress
        self._stopped = Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Thread: a worker."""
        try:
            self.made.append(self._make(self._report))
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._error = error

    async def stop_if_cancelled(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._stopped.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self.made[0]

    def _report(self, fraction: float) -> bool:
        """Whether to go on loading."""
        if self._progress is not None:
            self._progress(fraction)
        return not self._stopped.is_set()
