"""The engine as asyncio and trio programs use it."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio

from pyllama_raw.api.loading import Opening, Progress, Report, load
from pyllama_raw.api.model import Model, build_on
from pyllama_raw.api.owner import Owner
from pyllama_raw.api.text_verbs import TextVerbs
from pyllama_raw.api.vector_verbs import VectorVerbs
from pyllama_raw.engine.own_thread import check_may_wait
from pyllama_raw.errors import ClosedError
from pyllama_raw.options.arguments import (
    check_opening,
    checked_adapter,
    checked_file,
    checked_number,
    checked_salt,
    checked_wait,
)
from pyllama_raw.prompts.prompt import PromptEncoder

if TYPE_CHECKING:  # the rest comes in while a model loads
    from pyllama_raw.api.events import Events
    from pyllama_raw.core.memory.cache_stats import CacheStats
    from pyllama_raw.core.stats import SlotStats
    from pyllama_raw.engine.parts import EngineParts
    from pyllama_raw.options.config import EngineConfig
    from pyllama_raw.options.requests import Need


class AsyncEngine(Owner, TextVerbs, VectorVerbs):
    """A loaded model that serves any number of requests at once."""

    def __init__(
        self, parts: EngineParts, encoder: PromptEncoder | None = None
    ) -> None:
        """Use open(); this is for tests and for own executors."""
        from pyllama_raw.api.embedding import Embedders
        from pyllama_raw.api.preparation import Preparation
        from pyllama_raw.api.workers import Workers
        from pyllama_raw.engine.thread import EngineThread

        self._parts = parts
        encoder = encoder or PromptEncoder.of(parts)
        self._workers = Workers()
        try:
            self._thread = EngineThread(parts, encoder.close)
        except BaseException:
            self._workers.close()
            raise
        self._preparation = Preparation(
            parts,
            encoder,
            self._thread.clock,
            self._thread.adapters,
            self._workers,
        )
        self._embedders = Embedders(parts, encoder, self._thread, self._workers)

    @classmethod
    def open(
        cls,
        model: str | Path | Model | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        needs: Need | None = None,
    ) -> Opening[Self]:
        """
        Load *model* in a worker thread: `async with AsyncEngine.open() as engine`.

        The end of the block closes it. `engine = await AsyncEngine.open()` leaves that to
        aclose(). Engines share the weights of the same file, loaded with the same options.

        Args:
            model: a GGUF file, or a Model, which is shared and whose options count; None:
                the default model, downloaded if need be.
            progress: called in the worker thread with the loaded fraction, 0 to 1.
            needs: what the model must be able to do: one that cannot is refused before its
                weights are read. None: anything that an engine does.

        Raises:
            ConfigError: an argument is none of these, or *config* wants the Model loaded
                in another way.
            ClosedError: the Model is closed.
            ModelLoadFailed, ContextFailed, LibraryNotBuilt, Unsupported: it cannot be
                opened here.
        """

        async def make() -> Self:
            path = None if isinstance(model, Model) else model
            check_opening(path, config, progress, needs)
            made = await load(partial(_build, model, config, needs), progress, _give_up)
            return cls(*made)

        return Opening(make)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self, drain_s: float = 0.0) -> None:
        """
        Refuse new requests, end all others and free the model; can be repeated.

        Args:
            drain_s: seconds that running and waiting requests have to be done; what is
                left then ends as `FinishReason.CLOSED` with what it has. Cancelling
                aclose() ends the wait.
        """
        from pyllama_raw.api.workers import arrival_of

        check_may_wait()
        drain_s = checked_wait("drain_s", drain_s)
        if not self._thread.is_ours:  # the parent's
            return
        try:
            if drain_s:
                self._thread.close(drains=True)
                with anyio.move_on_after(drain_s):
                    await arrival_of(self._thread.gone)
        finally:
            self._thread.close()
            with anyio.CancelScope(shield=True):
                with suppress(ClosedError):  # another call has closed it
                    await self._workers.run("embedder", self._embedders.close)
                await arrival_of(self._thread.gone)
            self._workers.close()
            self._thread.join()
            self._workers.join()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):  # also of an engine that has failed
            self._workers.close()
        if hasattr(self, "_embedders") and self._thread.alive:
            self._thread.close()
            self._embedders.leave()
            warnings.warn(
                f"{self!r} was dropped before aclose(): use `async with`",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    def events(self, max_events: int = 1024) -> Events:
        """
        Events of the engine and of its requests, as they happen; see Events.

        Args:
            max_events: that wait for their reader; then the oldest are lost, and it is told.

        Raises, on entering the block:
            ClosedError, EngineStopped.
        """
        from pyllama_raw.api.events import Events

        most = checked_number("max_events", max_events, 1, 2**20)
        return Events(self._thread, most)

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """
        Load the LoRA or control vector at *path*: `generate(..., adapters={name: 1.0})`.

        Requests that run go on. An earlier adapter of that name is as if unloaded. Adapters
        that no request uses give way, the longest unused first, to keep max_adapter_bytes.

        Raises:
            InvalidRequest: *name* or *path* is none.
            AdapterLoadFailed: there is no such file, it is damaged, or of another model.
            AdapterLimit: the adapters that requests use leave no room.
            Unsupported: the model generates no text.
            ClosedError, EngineStopped: as generate().
        """
        self._thread.check_for_waiting()
        file = checked_file("path", path)
        load = partial(self._thread.adapters.load, checked_adapter(name), file)
        await self._workers.run("adapters", load)

    async def unload_adapter(self, name: str) -> None:
        """
        Let no further request have the adapter; it is freed when those that use it have ended.

        Raises:
            AdapterNotFound: there is none of that name.
        """
        self._thread.adapters.unload(checked_adapter(name))

    async def slots(self) -> tuple[SlotStats, ...]:
        """The slots that run a request, by number, between two steps."""
        from pyllama_raw.api.workers import answer_of

        return await answer_of(self._thread.call(self._parts.scheduler.slots))

    async def cache_stats(self) -> CacheStats:
        """Tokens reused and bytes stored, between two steps."""
        from pyllama_raw.api.workers import answer_of

        return await answer_of(self._thread.call(self._parts.scheduler.cache_stats))

    async def clear_cache(self, cache_salt: str | None = None) -> int:
        """
        Forget what is kept of past requests: of *cache_salt*, or of all (None).

        Returns:
            Bytes of host memory freed. Running requests go on.

        Raises:
            InvalidRequest: no salt that a request could have.
        """
        from pyllama_raw.api.workers import answer_of

        salt = checked_salt(cache_salt)
        forget = partial(_forget, self._parts, salt)
        return await answer_of(self._thread.call(forget))


def _forget(parts: EngineParts, salt: str | None) -> int:
    """Bytes of host memory freed."""
    n_bytes = 0 if parts.media is None else parts.media.encoder.clear(salt)
    return n_bytes + parts.scheduler.clear_cache(salt)


def _build(
    model: str | Path | Model | None,
    config: EngineConfig | None,
    needs: Need | None,
    report: Report,
) -> tuple[EngineParts, PromptEncoder]:
    """Thread: a worker."""
    from pyllama_raw.engine import opening
    from pyllama_raw.options import models

    if isinstance(model, Model):
        config = models.with_projector(config, None, Path(model.path))
        parts = build_on(model, config, needs)
    else:
        path = models.resolve_model(model)
        config = models.with_projector(config, model, path)
        parts = opening.build(path, config, needs, report)
    try:
        return parts, PromptEncoder.of(parts)
    except BaseException:
        parts.release()
        raise


def _give_up(made: tuple[EngineParts, PromptEncoder]) -> None:
    made[0].release()
