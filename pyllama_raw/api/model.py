"""
Models: one that is loaded, to be shared by engines; how an engine is opened on one; and what can be
found out before that.

A load blocks no event loop, and is given up when its caller is cancelled. An `Owner` is what owns
threads or memory of C, which exist once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NoReturn,
    Protocol,
    Self,
    SupportsIndex,
    TypeVar,
)

import anyio
from anyio import CancelScope, to_thread
from anyio.lowlevel import checkpoint

from pyllama_raw.engine import opening
from pyllama_raw.engine.info import EngineState
from pyllama_raw.engine.shared_models import open_model
from pyllama_raw.errors import ClosedError, ConfigError, WrongUse, shown
from pyllama_raw.options import models
from pyllama_raw.options.arguments import check_loading, check_opening
from pyllama_raw.options.chat_templates import AUTO, given_template
from pyllama_raw.prompts.chat import check_reads
from pyllama_raw.prompts.rendering.processes import Unreadable

if TYPE_CHECKING:
    from pyllama_raw.engine.estimate import Device, MemoryEstimate, ModelProbe
    from pyllama_raw.engine.parts import EngineParts, Inheritance
    from pyllama_raw.engine.shared_models import ModelUse
    from pyllama_raw.options.config import EngineConfig, ModelConfig
    from pyllama_raw.options.requests import Need


class Owner:
    """Refuses to be copied and pickled: the end of one copy would be the end of all."""

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        raise WrongUse(
            f"{type(self).__name__} cannot be copied or pickled, because it owns threads or "
            "memory that exist once: pass the object itself, and open another one in "
            "another process"
        )

    def _warn_dropped(self, consequence: str) -> None:
        """Warn that nobody has it any more, and *consequence* what that means."""
        warnings.warn(
            f"{self!r} was dropped {consequence}", ResourceWarning, 2, source=self
        )


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
        self._value: C | None = None
        self._is_making = False

    def __await__(self) -> Generator[Any, None, C]:
        return self._open().__await__()

    async def _open(self) -> C:
        self._is_making = True
        try:
            self._value = await self._make()
        finally:
            self._is_making = False
        return self._value

    async def __aenter__(self) -> C:
        return await self

    async def __aexit__(self, *_: object) -> None:
        if self._value is not None:
            await self._value.aclose()


class EngineOpening(Opening[S]):
    """An engine to be opened; its state can be asked for meanwhile."""

    @property
    def state(self) -> EngineState:
        """`idle` until it is awaited and after a failure, `loading`, then the engine's."""
        if self._value is not None:
            return self._value.state
        return EngineState.LOADING if self._is_making else EngineState.IDLE

    if not TYPE_CHECKING:  # checkers know that an opening has no verbs

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"there is no {shown(name)} before the engine is open: "
                "`async with AsyncEngine.open() as engine`, or `engine = await AsyncEngine.open()`",
                name=name,
                obj=self,
            )


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
    stopped, value = Event(), Future[T]()

    def report(fraction: float) -> bool:
        if progress is not None:
            progress(fraction)
        return not stopped.is_set()

    def run() -> None:
        try:
            value.set_result(make(report))
        except BaseException as error:  # noqa: BLE001 - raised below
            value.set_exception(error)

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
        if value.done() and value.exception() is None:
            give_up(value.result())
        raise
    return value.result()


class Model(Owner):
    """
    The weights of a model, for any number of engines with contexts of their own.

    A process loads a file with the same options once: engines that are opened by path
    share the weights, too. This object keeps them when no engine is open. They are freed
    when it and all engines are closed.

    Thread:
        Any, in any event loop.
    """

    def __init__(self, use: ModelUse, config: ModelConfig) -> None:
        """Use open() or load()."""
        self._use = use
        self.config = config
        self.path = use.model.path
        self.metadata: Mapping[str, str] = use.model.meta  # of the file, without arrays

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        config: ModelConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> Opening[Self]:
        """
        Load *model* in a worker thread: `async with Model.open(path) as model`.

        `model = await Model.open(path)` leaves closing to aclose(). Cancelling it stops the
        loading, unless others wait for the same model.

        Args:
            model: a GGUF file; None: the default model, downloaded if need be.
            progress: called in the worker thread with the loaded fraction, 0 to 1.

        Raises:
            ConfigError: an argument is none of these.
            ModelLoadFailed, LibraryNotBuilt: it cannot be loaded here.
        """

        async def make() -> Self:
            check_loading(model, config, progress)
            return await load(
                lambda report: cls._load(model, config, report), progress, cls.close
            )

        return Opening(make)

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        config: ModelConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> Self:
        """Like open(), without an event loop: blocks; close() or a `with` block frees it."""
        check_loading(model, config, progress)

        def report(fraction: float) -> bool:
            if progress is not None:
                progress(fraction)
            return True

        return cls._load(model, config, report)

    @classmethod
    def _load(
        cls, model: str | Path | None, config: ModelConfig | None, report: Report
    ) -> Self:
        from pyllama_raw.options.config import ModelConfig  # pydantic

        config = config or ModelConfig()
        path = models.resolve_model(model)
        return cls(open_model(path, config.opening, report), config)

    @property
    def closed(self) -> bool:
        """Whether close() was called; engines may still use the weights."""
        return self._use.closed

    def close(self) -> None:
        """Let go of the weights; the last engine on them frees them. Can be repeated."""
        self._use.close()

    async def aclose(self) -> None:
        """close() in a worker thread: freeing many gigabytes takes a while."""
        with CancelScope(shield=True):
            await to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = shown(self.metadata.get("general.name", "model without a name"))
        return f"<Model {name}: {'closed' if self.closed else 'open'}>"

    def __del__(self) -> None:
        if hasattr(self, "metadata") and not self.closed:
            self.close()
            self._warn_dropped("before close(): use `async with` or `with`")


@dataclass(frozen=True, slots=True)
class Opener:
    """The arguments that an engine was opened with."""

    model: str | Path | Model | None
    config: EngineConfig | None
    needs: Need | None

    def parts(
        self, report: Report, *, inheritance: Inheritance | None = None
    ) -> EngineParts:
        """
        The parts of an engine on the model, a file or a Model, which may be closed meanwhile.

        Args:
            report: gets the loaded fraction; returning False cancels the load.
            inheritance: what there is of earlier parts.

        Thread:
            A worker, because it takes as long as the load.

        Raises:
            ClosedError: the Model is closed already.
            ConfigError: the configuration wants the Model loaded in another way, or its chat
                template cannot be used.
        """
        model, config = self.model, self.config
        if config is not None:
            _check_template(config.model)
        if isinstance(model, Model):
            return opening.build_shared(
                _shared(model), model.config, config, self.needs, inheritance
            )
        path = models.resolve_model(model)
        config = models.with_projector(config, model, path)
        return opening.build(path, config, self.needs, report, inheritance)


def release(parts: EngineParts) -> None:
    """Free what was made for nobody."""
    parts.release()


def _shared(model: Model) -> ModelUse:
    try:
        return model._use.share()
    except ClosedError:
        reason = f"{model!r}: open the model again, or open engines before it is closed"
        raise ClosedError(reason) from None


def _check_template(config: ModelConfig) -> None:
    """Raise ConfigError if chats could not be rendered by the template of *config*."""
    value = config.chat_template
    if value is None or value == AUTO:
        return
    try:
        check_reads(given_template(value).text, config.template_process)
    except (ValueError, Unreadable) as error:
        raise ConfigError(f"chat_template={shown(value)}: {error}") from error
    except OSError:  # there is no process for it: the first chat says what to do
        pass


def estimate_memory(
    model: str | Path | None = None, config: EngineConfig | None = None
) -> MemoryEstimate:
    """
    Bytes that an engine of *model* and *config* will take of each device.

    libllama reckons them; no weight is read.

    Args:
        model: as AsyncEngine.open() takes it.

    Raises:
        ConfigError: an argument or option is wrong.
        ModelLoadFailed, ContextFailed, ProjectorLoadFailed, Unsupported: it could not be
            opened.
    """
    check_opening(model, config, None, None)
    # libllama reckons, and options are checked: who asks for neither loads neither.
    from pyllama_raw.engine.estimate import estimate, resolved

    return estimate(*resolved(model, config))


def fit_memory(
    model: str | Path | None, config: EngineConfig, room: Mapping[str, int]
) -> EngineConfig:
    """
    *config* with so few cells and layers that an engine takes no more than *room*.

    Not fewer than `fit_ctx` cells, so it may take more.

    Args:
        model: as AsyncEngine.open() takes it.
        room: bytes by device; as many as there are where none is named.

    Raises:
        ConfigError, ModelNotFound, ModelLoadFailed: as `estimate_memory`.
    """
    if not config.fit_ctx:
        return config
    check_opening(model, config, None, None)
    from pyllama_raw.engine.estimate import fitted, resolved

    return fitted(*resolved(model, config), room=dict(room))


def probe(
    model: str | Path | None = None, config: EngineConfig | None = None
) -> ModelProbe:
    """
    Facts of *model*, and of the projector in *config*, without reading a weight.

    Raises:
        ConfigError, ModelLoadFailed, ContextFailed, ProjectorLoadFailed, Unsupported: as
            estimate_memory().
    """
    check_opening(model, config, None, None)
    from pyllama_raw.engine.estimate import probe_model, resolved  # as above

    return probe_model(*resolved(model, config))


def devices() -> tuple[Device, ...]:
    """Each device that libllama found, the CPU included, with its free memory of now."""
    from pyllama_raw.engine.estimate import devices as list_devices  # as above

    return list_devices()
