"""Loading a model without blocking the event loop, and giving it up when cancelled."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from threading import Event
from typing import Any, Generic, Protocol, TypeVar

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from pyllama_raw.engine.life import EngineState

Progress = Callable[[float], object]
Report = Callable[[float], bool]


class Closing(Protocol):
    """An object that is closed when its block ends."""

    async def aclose(self) -> None:
        """Free what was opened."""


class Stateful(Closing, Protocol):
    """An engine, as far as its opening knows it."""

    @property
    def state(self) -> EngineState:
        """The state now."""


T = TypeVar("T")
C = TypeVar("C", bound=Closing)
S = TypeVar("S", bound=Stateful)


class Opening(Generic[C]):
    """An object to be opened, by `async with`, which closes it, or by `await`."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, C]]) -> None:
        self._make = make
        self._made: C | None = None
        self._is_making = False

    def __await__(self) -> Generator[Any, None, C]:
        return self._open().__await__()

    async def _open(self) -> C:
        self._is_making = True
        try:
            self._made = await self._make()
        finally:
            self._is_making = False
        return self._made

    async def __aenter__(self) -> C:
        return await self

    async def __aexit__(self, *_: object) -> None:
        if self._made is not None:
            await self._made.aclose()


class EngineOpening(Opening[S]):
    """An engine to be opened; its state can be asked for meanwhile."""

    @property
    def state(self) -> EngineState:
        """`idle` until it is awaited and after a failure, `loading`, then the engine's."""
        if self._made is not None:
            return self._made.state
        return EngineState.LOADING if self._is_making else EngineState.IDLE


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
    stopped, made = Event(), Future[T]()

    def report(fraction: float) -> bool:
        if progress is not None:
            progress(fraction)
        return not stopped.is_set()

    def run() -> None:
        try:
            made.set_result(make(report))
        except BaseException as error:  # noqa: BLE001 - raised below
            made.set_exception(error)

    async def stop_if_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(stop_if_cancelled)
            await to_thread.run_sync(run)  # returns when loading has stopped
            group.cancel_scope.cancel()
        await checkpoint()
    except BaseException:
        if made.done() and made.exception() is None:
            give_up(made.result())
        raise
    return made.result()
