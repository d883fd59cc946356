"""
Listen, open the engines, answer until a signal comes, let what runs end.

The server is uvicorn, whose own handling of signals closes connections; so it is told to end
only when the engines are done.

A signal that comes while engines open ends the process at once: a load may be in C for long, and
nobody waits for an answer.

Models on demand are a cache, with the memory that they may take. A model is another one if its file, its
options or its adapters are; then a list that is read anew has it loaded anew.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from socket import AF_UNIX, socket
from threading import Thread
from time import sleep
from typing import Any, cast

import anyio
import uvicorn
from anyio import to_thread
from fastapi import FastAPI

from pyllama_raw import AsyncEngine, EngineConfig, devices
from pyllama_raw.options.models import model_files
from pyllama_raw.runners import CachedModel, LocalRunner, ModelCache, ModelRunner
from pyllama_raw.serve.answer import together
from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.config import ListenConfig, ModelsConfig
from pyllama_raw.serve.connections import (
    Connection,
    Connections,
    backlog_of,
    usable,
)
from pyllama_raw.serve.deployment import AdapterEntry, Deployment, ModelPlace
from pyllama_raw.serve.downloads import Downloads
from pyllama_raw.serve.listening import (
    LoadingApp,
    address_of,
    bound,
    files_of,
    hosts_of,
    release,
)
from pyllama_raw.serve.service import Service

Loading = Callable[[str, float], None]
Options = tuple[str | None, EngineConfig | None]
Prepare = Callable[[str | None, EngineConfig | None], Options]
Say = Callable[[str], None]

HOST = "CPU"
MARGIN_BYTES = 2**30  # of a device that stay free, or a 16th of a small one
TICK_S = 1.0  # between two looks at connections and at the date
LOOK_S = 0.5  # between two looks for the parent
DESCRIPTORS = 2**16  # that a process asks for, if it has fewer
EXIT = b"exit"  # the end of a line that a router of llama-server sends to end a process

OPTIONS: dict[str, Any] = {
    "log_level": "warning",
    "lifespan": "off",
    "ws": "none",
    "access_log": False,  # the gate has one
    "server_header": False,
    "timeout_graceful_shutdown": 1,  # for slow readers, once the engines have ended
}


async def deploy(
    deployment: Deployment,
    loading: Loading,
    say: Say,
    *,
    prepare: Prepare | None = None,
    reread: Callable[[], Deployment] | None = None,
    is_behind: bool = False,
) -> None:
    """
    Serve *deployment* until SIGTERM or SIGINT; a second signal ends what runs.

    Args:
        loading: called in a worker thread with a model and the fraction that is loaded.
        say: called with a line that has the address once requests are taken.
        prepare: makes the file and the options of an engine, in a worker thread, of those of
            *deployment*.
        reread: makes the deployment anew of its files, whose models are those of the service from
            then on; called in a worker thread.
        is_behind: this is the process of a model, with a service in front.

    Raises:
        OSError: an address cannot be had.
        PyllamaError: a model cannot be opened.
    """
    front = LoadingApp()
    models: ModelCache | None = None
    async with AsyncExitStack() as stack:

        async def open_engines() -> Service:
            if models is not None:
                return await open_models(models)
            engines = {}
            for name, path in deployment.models.items():
                options = path, deployment.configs.get(name)
                if prepare is not None:
                    options = await to_thread.run_sync(prepare, *options)
                progress = partial(loading, name)
                opening = AsyncEngine.open(*options, progress=progress)
                engines[name] = await stack.enter_async_context(opening)
                for adapter in deployment.adapters.get(name, ()):
                    await engines[name].load_adapter(adapter.name, adapter.path)
            app = make_app(engines, deployment.service, is_behind=is_behind)
            return answering(app)

        async def open_models(models: ModelCache) -> Service:
            for name, place in deployment.places.items():
                if place.load_on_start or place.pinned:
                    await models.load(name)
            read = None
            if reread is not None:
                read = lambda: cached_models(  # noqa: E731
                    reread(), loading, prepare, models.budget
                )
            configs = deployment.configs.values()
            has_media = any(config.media.mmproj is not None for config in configs)
            options = {"autoload": deployment.loading.autoload, "refresh": read}
            options["has_processes"] = deployment.loading.model_processes
            app = make_app(models, deployment.service, has_media=has_media, **options)
            service = answering(app)
            if service.is_llama and read is not None:
                service.downloads = Downloads(downloading, models, service.reread)
            return service

        def answering(app: FastAPI) -> Service:
            service: Service = app.state.service
            for name, adapters in deployment.adapters.items():
                service.scales[name] = {a.name: a.scale for a in adapters}
            front.app = app
            return service

        sockets = bound(deployment)
        if deployment.is_on_demand:
            try:
                models = await stack.enter_async_context(
                    await model_cache(deployment, loading, prepare)
                )
            except BaseException:
                release(sockets, files_of(sockets))
                raise
        # A group ends in the task in which it began, and engines open in another one.
        downloading = await stack.enter_async_context(together())
        stack.callback(downloading.cancel_scope.cancel)
        await _serve(front, open_engines, deployment, sockets, say, is_last=True)


def child() -> None:
    """Serve the one model that the environment says, for the service in front; a whole process."""
    from pyllama_raw.serve.processes import deployment_here, report

    say = partial(print, flush=True)
    serving = partial(deploy, deployment_here(), report, say, is_behind=True)
    has_uvloop = find_spec("uvloop") is not None
    anyio.run(serving, backend_options={"use_uvloop": has_uvloop})


async def serve(
    app: FastAPI, listen: ListenConfig, say: Say, *, is_last: bool = False
) -> None:
    """
    Answer until a signal comes and the engines are done, or drain_s are over.

    Args:
        say: called with a line that has the address once requests are taken.
        is_last: the process ends with the server, so further signals mean nothing.

    Raises:
        OSError: an address cannot be had.
    """
    await _serve(app, app.state.service, listen, bound(listen), say, is_last=is_last)


async def _serve(
    app: Any,
    opening: Service | Callable[[], Awaitable[Service]],
    listen: ListenConfig,
    sockets: Sequence[socket],
    say: Say,
    *,
    is_last: bool,
) -> None:
    """
    Answer by *app*.

    Args:
        opening: the service, or a function that opens its engines.
    """
    descriptors = _descriptors()
    limit = listen.max_connections or usable(descriptors, _n_used())
    connections = Connections(listen.head_s, limit)
    if isinstance(listen, Deployment):
        connections.has_titles = listen.service.in_place_of is not None
    options = uvicorn.Config(
        app,
        http=Connection.of(connections),
        backlog=backlog_of(descriptors, limit),
        timeout_keep_alive=cast("int", listen.keep_alive_s),  # or a fraction
        **OPTIONS,
    )
    server = _Server(options, connections)
    signals = _Signals(partial(release, sockets, files_of(sockets)))
    signals.is_open = isinstance(opening, Service)
    failures: list[Exception] = []

    async def work() -> None:
        await server.listens.wait()
        try:
            service = opening if isinstance(opening, Service) else await opening()
        except Exception as error:  # noqa: BLE001 - raised when the server has ended
            failures.append(error)
            server.end()
            return
        signals.is_open, connections.send_s = True, service.config.send_s
        for line in _lines(sockets, listen):
            say(line)
        await _end_at_signal(signals, service, server)

    _end_with(listen)
    try:
        with signals.counted(are_last=is_last):
            async with anyio.create_task_group() as group:
                group.start_soon(work)
                await server.serve([*sockets])
                group.cancel_scope.cancel()
    finally:
        server.close()
        signals.release()
    for error in failures:
        raise error


def _lines(sockets: Sequence[socket], listen: ListenConfig) -> Iterator[str]:
    """A line for each address; names are those that were given."""
    hosts = hosts_of(listen)
    own = hosts if len(hosts) == len(sockets) else [None] * len(sockets)
    # A name may stand for several addresses, and clients use the name.
    if len(hosts) == 1:
        sockets, own = sockets[:1], hosts
    for listener, host in zip(sockets, own, strict=True):
        yield f"serving at {address_of(listener, host)}"


# -- models on demand --------------------------------------------------------------------


async def model_cache(
    deployment: Deployment, loading: Loading, prepare: Prepare | None
) -> ModelCache:
    """The cache of the models of *deployment*, to be entered. Raises ConfigError."""
    config = deployment.loading
    if config.model_processes:
        from pyllama_raw.serve.processes import device_bytes

        budget = budget_of(config, await device_bytes())
    else:
        budget = await to_thread.run_sync(budget_of, config)
    return ModelCache(
        cached_models(deployment, loading, prepare, budget),
        budget=budget,
        max_models=config.models_max or None,
        max_wait_s=config.turn_wait_s,
        max_overtakes=config.max_model_overtakes,
        max_waiting=config.max_model_waiting,
        max_waiting_bytes=config.max_model_waiting_bytes,
    )


def budget_of(
    config: ModelsConfig, places: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, int]:
    """
    Bytes that all models may take, by device: as the options say, else what is free now.

    Args:
        places: bytes of each device, all and free. None: they are looked for.
    """
    if places is None:
        places = {
            device.name: (device.memory_total_bytes, device.memory_free_bytes)
            for device in devices()
            if device.kind in ("cpu", "gpu", "igpu")
        }
    budget = {
        name: max(n_free - min(MARGIN_BYTES, n_bytes // 16), 1)
        for name, (n_bytes, n_free) in places.items()
    }
    if config.memory_bytes is not None:
        budget[HOST] = config.memory_bytes
    return {**budget, **config.memory}


def cached_models(
    deployment: Deployment,
    loading: Loading,
    prepare: Prepare | None,
    budget: Mapping[str, int],
) -> dict[str, CachedModel]:
    """The models of *deployment*, none of which is loaded yet, and each of which fits *budget*."""
    return {
        name: _cached(name, deployment, loading, prepare, budget)
        for name in deployment.models
    }


def _cached(
    name: str,
    deployment: Deployment,
    loading: Loading,
    prepare: Prepare | None,
    budget: Mapping[str, int],
) -> CachedModel:
    path, config = deployment.models[name], deployment.configs.get(name)
    adapters = deployment.adapters.get(name, ())
    place, of_all = deployment.places.get(name, ModelPlace()), deployment.loading

    model: ProcessModel | None = None
    if of_all.model_processes:
        from pyllama_raw.serve.processes import ModelProcess, ProcessModel

        options = name, path, config, adapters, deployment.service, budget, prepare
        model = ProcessModel(*options)

    def make(progress: Callable[[float], object]) -> ModelRunner:
        def report(fraction: float) -> None:
            progress(fraction)
            loading(name, fraction)

        if model is not None:
            return ModelProcess(model, report)
        return LocalRunner(
            path,
            config,
            name=name,
            prepare=prepare,  # type: ignore[arg-type]
            on_open=partial(_load_adapters, adapters),
            progress=report,
            room=budget,
        )

    key = None if config is None else config.model_dump_json()
    return CachedModel(
        make,
        is_pinned=place.pinned,
        sleep_s=_idle_s(place.sleep_idle_s, of_all.sleep_idle_s),
        unload_s=_idle_s(place.unload_idle_s, of_all.unload_idle_s),
        key=(
            path,
            *map(_file_key, _files_of(path, config, adapters)),
            key,
            adapters,
            of_all.model_processes,
        ),
        adapters=frozenset(adapter.name for adapter in adapters),
        source=deployment.sources.get(name, "preset"),
    )


async def _load_adapters(
    adapters: tuple[AdapterEntry, ...], engine: AsyncEngine
) -> None:
    for adapter in adapters:
        await engine.load_adapter(adapter.name, adapter.path)


def _idle_s(own_s: float | None, of_all_s: float | None) -> float:
    """The time of a model without use; inf: for ever."""
    idle_s = of_all_s if own_s is None else own_s
    return inf if idle_s is None or idle_s < 0 else idle_s


def _files_of(
    path: str | None, config: EngineConfig | None, adapters: tuple[AdapterEntry, ...]
) -> Iterator[str | None]:
    """All files that a model is made of, as far as their names say."""
    yield from [None] if path is None else model_files(path)
    if config is not None and config.media.mmproj is not None:
        yield str(config.media.mmproj)
    yield from (adapter.path for adapter in adapters)


def _file_key(path: str | None) -> tuple[int, int] | None:
    """What tells a file from one that took its place. None: it is not there, or not a file."""
    if path is None:
        return None
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


# -- the server, and its end -------------------------------------------------------------


class _Server(uvicorn.Server):
    """A server at sockets that listen already, which leaves signals to serve()."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.servers: list[asyncio.Server] = []
        self.listens, self._ends = anyio.Event(), anyio.Event()
        self._connections = connections

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Answer who has connected."""
        loop, config = asyncio.get_running_loop(), self.config

        def protocol(_: object = None) -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            connection: asyncio.Protocol = kind(
                config=config, server_state=self.server_state, app_state={}, _loop=loop
            )
            return connection

        for listener in sockets or ():
            is_unix = listener.family == AF_UNIX
            make: Any = loop.create_unix_server if is_unix else loop.create_server
            self.servers.append(
                await make(protocol, sock=listener, backlog=config.backlog)
            )
        self.started = True
        self.listens.set()

    def close(self) -> None:
        """
        Have the event loop forget the sockets and all connections; can be repeated.

        A server that is cancelled does not shut itself down. If its sockets alone were closed, the
        loop would take a later one with their numbers for them, and never look at it.
        """
        for listener in self.servers:
            listener.close()
        for connection in [*self._connections.all]:
            connection.abort()

    def end(self) -> None:
        """Have the server end."""
        self.should_exit = True
        self._ends.set()

    async def main_loop(self) -> None:
        """Look for connections that are over their time, until the end: an idle server costs next to nothing."""
        while not await self.on_tick(0):
            self._connections.sweep(asyncio.get_running_loop().time())
            with anyio.move_on_after(TICK_S):
                await self._ends.wait()


class _Signals:
    """SIGINT and SIGTERM while a server runs. Thread: the main one."""

    def __init__(self, release: Callable[[], None]) -> None:
        """
        Args:
            release: closes the sockets of the server, and takes away their files.
        """
        self.is_open = False  # all engines are
        self.release = release
        self._n, self._loop = 0, asyncio.get_running_loop()
        self._came = anyio.Event()  # one after the latest look
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def counted(self, *, are_last: bool) -> Iterator[None]:
        """
        Count signals within the block.

        Args:
            are_last: signals after the block are ignored, because the process is at its end.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_IGN if are_last else handler)

    def _count(self, number: int, *_: object) -> None:
        if not self.is_open:
            self.release()
            os._exit(128 + number)
        self._n += 1
        # A handler runs between any two lines, so the loop sets the event when it comes to that.
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._came.set()

    async def arrival(self, n: int) -> None:
        """Return when *n* have come."""
        while self._n < n:
            self._came = anyio.Event()
            await self._came.wait()


def _end_with(listen: ListenConfig) -> None:
    """Send this process a signal when that ends which it is to end with."""
    parent = os.getppid()

    def wait() -> None:
        if listen.ends_with == "parent":
            while os.getppid() == parent:
                sleep(LOOK_S)
        else:
            for line in iter(sys.stdin.buffer.readline, b""):
                if line.strip().endswith(EXIT):
                    break
        os.kill(os.getpid(), signal.SIGTERM)

    if listen.ends_with != "signal":
        Thread(target=wait, name="pyllama_raw end", daemon=True).start()


async def _end_at_signal(signals: _Signals, service: Service, server: _Server) -> None:
    await signals.arrival(1)
    service.drain()
    async with anyio.create_task_group() as group:
        group.start_soon(_drain, service, group.cancel_scope)
        await signals.arrival(2)
        group.cancel_scope.cancel()
    server.end()


async def _drain(service: Service, scope: anyio.CancelScope) -> None:
    service.models.refuse()
    async with anyio.create_task_group() as group:
        for engine in service.engines.values():
            group.start_soon(engine.aclose, service.config.drain_s)
        if service.has_processes:
            group.start_soon(service.models.aclose, service.config.drain_s)
    scope.cancel()


def _descriptors() -> int:
    """The descriptors that the process may have, as many as it can be allowed."""
    if sys.platform == "win32":
        return 2**13  # of the C library
    import resource

    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if allowed != resource.RLIM_INFINITY and allowed < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if allowed == resource.RLIM_INFINITY else min(allowed, DESCRIPTORS)


def _n_used() -> int:
    """The descriptors that are in use."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return len([*Path(folder).iterdir()])
    return 64
