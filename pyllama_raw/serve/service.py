"""
The models of a service by name, what its requests may have of them, and what became of requests.

A request for text is counted by the admission of its engine, which refuses those beyond its slots
and its queue. The service counts once more, before that: a body that is not read costs next to
nothing, and until a prompt is made no engine knows of the request.

Models are those of a `ModelCache`. Engines that a program has opened are there from the beginning;
others are loaded for the requests that name them, each of which has a claim on its model until it has
ended. Facts make none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from math import ceil, inf
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from weakref import finalize

from anyio import Lock, move_on_after, sleep, to_thread
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw import AsyncEngine
from pyllama_raw.api.metrics import EngineMetrics
from pyllama_raw.errors import ClosedError, ConfigError, QueueFull
from pyllama_raw.results import Operation, Pooling, Watcher
from pyllama_raw.runners import (
    CachedModel,
    Claim,
    LocalRunner,
    ModelCache,
    ModelState,
    RunnerCapabilities,
)
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.downloads import Downloads
from pyllama_raw.serve.failures import Failure, refused
from pyllama_raw.serve.keys import ADMIN, Key, Keys, Rates
from pyllama_raw.serve.reading import DRAINING, Bodies

UNPOOLED = (None, Pooling.NONE, Pooling.RANK)  # of models that are made for no vectors
NOT_LOADED = "model is not loaded"
REREAD_REST = 4  # after a read of the list of models, for the time that it took
LOADED, LOADING, SLEEPING = (
    ModelState.LOADED,
    ModelState.LOADING,
    ModelState.SLEEPING,
)
MAX_ENDED = 4096  # requests whose counts a service in front may ask for
NO_LIMITS: Mapping[str, float] = {}
# Reads the list of models anew.
Refresh = Callable[[], Mapping[str, CachedModel]]
LEFT = 499  # the status of a client that left before it had one
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}

T = TypeVar("T")


# -- one request -------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Exchange:
    """A request, and what became of it so far; the gate keeps it in the state of the scope."""

    request_id: str
    method: str
    path: str
    key: Key | None = None
    client: str = ""  # the owner of the key; "" without keys
    n_read: int = 0  # bytes of its body
    status: int = LEFT
    n_bytes: int = 0  # of the answer
    is_whole: bool = False  # all of it was sent
    refused: str | None = None  # the code of the error, if there was no room for it
    model: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    ignored: list[str] = field(default_factory=list)
    """Fields of the body that change nothing here; names of our own tables only."""
    claim: Claim | None = None  # on the model, if that is loaded on demand
    content: bytes = b""  # of its body, where it may be sent on to a process
    number: str = ""  # that a service in front has given it
    began: float = field(default_factory=monotonic)


# The exchange that this code works for, also in threads and tasks that it begins. None: the code of
# a program beside the service.
CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


class ServedModel(NamedTuple):
    """The model that a request names."""

    name: str
    engine: AsyncEngine
    adapters: Mapping[str, float] = {}  # of `base:adapter`, each with its scale


class ServingProcess(Protocol):
    """A model in a process of its own, as processes.py has them."""

    name: str

    @property
    def capabilities(self) -> RunnerCapabilities:
        """The abilities of the model."""

    @property
    def n_places(self) -> int:
        """Requests that it has slots for, and that may wait for one."""

    def sent_on(self, request: Request, service: Service) -> Response:
        """The answer of the process to *request*."""

    async def fact(self, path: str) -> Any:
        """The answer to GET *path*. None: there is none for now."""

    async def metrics(self) -> list[Metric] | None:
        """Families of its engine. None: there are none for now."""

    async def state(self) -> str:
        """A word for how it is."""


class Elsewhere(Exception):
    """A request is that of a model in a process of its own, which is to answer it."""

    def __init__(self, process: ServingProcess) -> None:
        super().__init__(process.name)
        self.process = process


# -- all requests ------------------------------------------------------------------------


class Service:
    """The state that all answers share. Thread: that of the event loop."""

    def __init__(
        self,
        models: Mapping[str, AsyncEngine] | ModelCache,
        config: ServeConfig,
        *,
        autoload: bool = True,
        has_media: bool = False,
        has_processes: bool = False,
        is_behind: bool = False,
        refresh: Refresh | None = None,
    ) -> None:
        """
        Args:
            autoload: whether a request loads its model, unless it says otherwise.
            has_media: models that are loaded later may take images or sounds.
            has_processes: runners of the models are those of processes.py.
            is_behind: it is such a process, with a service in front.
            refresh: reads the list of models anew, in a worker thread; None: it never changes.

        Raises:
            ConfigError: a file of the options cannot be used.
        """
        if not isinstance(models, ModelCache):
            runners = {n: LocalRunner(engine, name=n) for n, engine in models.items()}
            models = ModelCache(there=runners)
        self.models, self.config = models, config
        self.autoload, self.refresh = autoload, refresh
        self.has_processes, self.is_behind = has_processes, is_behind
        # Engines that the program has opened stay; only those of others are looked for.
        self._own_engines: dict[str, AsyncEngine] | None = None
        self._own_engines = None if models.is_dynamic else self.engines
        # Clients of llama-server tell a router by the status of its models.
        self.is_router = models.is_dynamic and (refresh is not None or len(models) > 1)
        self.drains = False  # drain() was called
        self.downloads: Downloads | None = None
        self._reading, self._n_reads = Lock(), 0  # of the list of models
        self._reread_at = -inf  # from when on it may be read
        self.is_llama = config.in_place_of is not None
        # Scales of adapters of each model, for requests that name none.
        self.scales: dict[str, dict[str, float]] = {}
        self.started = int(time())  # Unix time
        self.keys, self.rates = Keys(config, is_behind=is_behind), Rates(config)
        options = (engine.info.config.media for engine in self.engines.values())
        has_media = has_media or any(media.mmproj is not None for media in options)
        self.bodies, self.traffic = Bodies(config, has_media=has_media), Traffic()
        self._log = None if config.access_log is None else AccessLog(config.access_log)
        self._metrics: dict[AsyncEngine, EngineMetrics] = {}
        for engine in self.engines.values():
            self.metrics_of(engine)

        # Options of requests that say nothing else.
        defaults = config.defaults
        self.sampling = {n: getattr(defaults, n) for n in defaults.model_fields_set}
        limits = {"deadline_s": config.deadline_s, "max_wait_s": config.max_wait_s}
        self.time_limits = {
            n: limit for n, limit in limits.items() if limit is not None
        }

        self.n_open = 0
        # Tokens of prompts, cached and of outputs, by numbers of a service in front.
        self.ended_counts: dict[str, tuple[int, int, int]] = {}

    @property
    def engines(self) -> dict[str, AsyncEngine]:
        """The engines that are there now, by the names of their models."""
        if self._own_engines is not None:
            return self._own_engines
        return {
            name: runner.engine
            for name, runner in self.models.loaded().items()
            if isinstance(runner, LocalRunner) and runner.engine is not None
        }

    @property
    def processes(self) -> dict[str, ServingProcess]:
        """Models that are loaded in processes of their own, by name."""
        if not self.has_processes:
            return {}
        return cast("dict[str, ServingProcess]", self.models.loaded())

    @property
    def counts_tokens(self) -> bool:
        """Whether somebody wants to know the tokens of each request."""
        return self._log is not None or self.config.tokens_per_minute is not None

    def metrics_of(self, engine: AsyncEngine) -> EngineMetrics:
        """What *engine* does is counted, from the first call on. Raises ClosedError."""
        if engine not in self._metrics:
            engine.watch(TextCounter())
            metrics = EngineMetrics(engine)
            # Of engines that are gone nothing is kept.
            here = {*self.engines.values()}
            of_others = {e: m for e, m in self._metrics.items() if e in here}
            self._metrics = {**of_others, engine: metrics}
        return self._metrics[engine]

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.drains = True
        self.bodies.drain()
        if self.downloads is not None:
            self.downloads.close()

    def check_room(self) -> None:
        """Raise Failure if the service is about to end, or handles as many requests as it may."""
        if self.drains:
            raise Failure(503, "server_is_draining", DRAINING)
        # As many as all engines have slots and let wait, and as may wait for models.
        engines = self.engines.values()
        infos = [engine.info for engine in engines]
        max_open = sum(i.n_slots + i.config.scheduler.max_waiting for i in infos)
        if self.models.is_dynamic:
            max_open += self.models.max_waiting
        if self.has_processes:
            max_open += sum(process.n_places for process in self.processes.values())
        if self.n_open >= max_open:
            headers = {"retry-after": str(retry_s(engines))}
            message = "all places of the queue are taken: try again, or elsewhere"
            raise Failure(503, "server_is_overloaded", message, headers=headers)

    def check_open(self, facts: str | None) -> None:
        """Raise Failure if *facts* are told to nobody."""
        if facts in self.config.closed and not self.is_behind:
            status = 404 if facts == "page" else 501
            message = f"{facts} are told to nobody: start the service with --{facts}"
            raise Failure(status, "unsupported", message)

    async def read_body(self, function: Callable[[], T]) -> T:
        """
        The result of *function*, in a worker if the body of the current request is large.

        Args:
            function: looks at each part of the body, of which there may be `max_body_values`.
                It may read what the service shares, and change nothing of it.
        """
        exchange = CURRENT.get()
        return await self.bodies.run(function, exchange.n_read if exchange else 0)

    # -- models -------------------------------------------------------------------------

    async def admit(
        self,
        exchange: Exchange,
        name: str | None,
        need: Operation | None,
        *,
        autoload: bool | None = None,
        keep_alive_s: float | None = None,
        limits: Mapping[str, float] = NO_LIMITS,
    ) -> None:
        """
        Return once the model that *name* stands for is loaded, until the exchange has ended.

        Args:
            need: what the model is to do, if *name* is None.
            autoload: whether it may be loaded. None: as the service says.
            limits: `deadline_s` and `max_wait_s` of the request.

        Raises:
            Failure: there is no such model, it may not be loaded, or it took too long.
            PyllamaError: as ModelCache.claim().
        """
        if not self.models.is_dynamic:
            return
        model = self._meant(name, need)
        autoload = self.autoload if autoload is None else autoload
        is_there = self.models.status(model).state in (LOADED, LOADING, SLEEPING)
        if not autoload and not is_there:
            raise Failure(400, "model_not_loaded", NOT_LOADED, "model")
        limit_s = min(limits.values(), default=inf)
        try:
            with move_on_after(limit_s):
                exchange.claim = await self.models.claim(
                    model,
                    client=exchange.client,
                    keep_alive_s=keep_alive_s,
                    n_bytes=exchange.n_read,
                )
        except ClosedError as error:  # which advises programs
            raise Failure(503, "server_is_draining", DRAINING) from error
        except QueueFull as error:
            # The service has its limits as options of other names.
            knob = f"max_model_{error.knob.removeprefix('max_')}"
            reason = f"requests that wait for models take all the room ({knob})"
            message = f"{reason}: try again, or elsewhere"
            headers = {"retry-after": str(retry_s(self.engines.values()))}
            code = "server_is_overloaded"
            raise Failure(503, code, message, headers=headers) from error
        if exchange.claim is None:
            message = (
                f"model {model} was not loaded within {limit_s:g} s: try again later"
            )
            raise Failure(503, "waited_too_long", message)
        if self.has_processes:
            return
        engine = self.engines.get(model)
        if engine is None:
            reason = "its runner has no engine here, so it is not served over HTTP"
            raise Failure(501, "unsupported", f"model {model}: {reason}", "model")
        self.metrics_of(engine)

    async def reread(self) -> None:
        """
        Have the list of models as it is read anew, if it can be.

        One read at a time, and all who came before it began share it, because it takes long where
        models are many. After one comes a rest of REREAD_REST times as long, so that nobody keeps a
        thread busy by asking.

        Raises:
            ConfigError: it cannot be read, and stays as it is.
        """
        if self.refresh is None:
            return
        n_reads = self._n_reads
        async with self._reading:
            if self._n_reads > n_reads:
                return
            await sleep(max(self._reread_at - monotonic(), 0.0))
            began = monotonic()
            self._n_reads += 1
            try:
                self.models.replace(await to_thread.run_sync(self.refresh))
            except BaseException:
                self._n_reads -= 1  # who waits tries it again
                raise
            finally:
                now = monotonic()
                self._reread_at = now + REREAD_REST * (now - began)

    def base_of(self, name: str) -> str | None:
        """The model of a name, an alias or `base:adapter`; None: there is none."""
        name = self.config.aliases.get(name, name)
        base = name.rpartition(":")[0]
        return next((n for n in (name, base) if n in self.models), None)

    def _meant(self, name: str | None, need: Operation | None) -> str:
        """The model that a request is for, also where it names none. Raises Failure."""
        name = name or None
        model = None if name is None else self.base_of(name)
        if name is not None and model is not None:
            adapter = self.config.aliases.get(name, name)[len(model) + 1 :]
            # A model that is not there has the adapters that are loaded with it: no load would help.
            is_there = not adapter or model in self.models.loaded()
            if not (is_there or adapter in self.models.adapters_of(model)):
                raise self._missing(name)
            return model
        if name is not None and not self.config.any_model:
            raise self._missing(name)
        if self.is_llama and self.is_router:
            message = "model name is missing from the request"
            raise Failure(400, "invalid_request", message, "model")
        engines = self.engines
        able = (
            model
            for model, engine in engines.items()
            if need is None or need in engine.capabilities.operations
        )
        able_processes = (
            model
            for model, process in self.processes.items()
            if need is None or need in process.capabilities.verbs
        )
        first = next(chain(able, able_processes, self.models), None)
        if first is None:
            message = "there is no model: give some with --models-dir, or by name"
            raise Failure(400, "model_not_found", message, "model")
        return first

    def _missing(self, name: str) -> Failure:
        if self.is_llama and self.is_router:
            message = f"model '{name}' not found"
            return Failure(400, "model_not_found", message, "model")
        message = f"there is no model {name!r}: there are {', '.join(self.models)}"
        return Failure(404, "model_not_found", message, "model")

    def find(self, name: str | None, need: Operation) -> ServedModel:
        """
        The model that *name* stands for; None: the first that can do what is asked.

        Raises:
            Failure: there is no such model.
            Unsupported: it cannot do this.
        """
        model, name = None, name or None  # clients without a model send an empty name
        exchange = CURRENT.get()
        # A model that is loaded on demand was chosen when the request came in.
        if exchange is not None and exchange.claim is not None:
            is_base = name is None or self.base_of(name) is None
            model = self.named(exchange.claim.model if is_base else name)
        elif name is not None:
            try:
                model = self.named(name)
            except Failure:
                if not self.config.any_model:
                    raise
        if model is None:
            able = [
                ServedModel(name, engine)
                for name, engine in self.engines.items()
                if need in engine.capabilities.operations
            ]
            # Of those that make vectors, one that is made for it comes first.
            if need is Operation.EMBED:
                able.sort(key=lambda m: m.engine.capabilities.model.pooling in UNPOOLED)
            model = able[0] if able else self.named(None)
        model.engine.capabilities.check(need)
        return model

    def named(self, name: str | None) -> ServedModel:
        """
        The model that *name* stands for; None: the first, or that of the request.

        Raises:
            Failure: there is no such model, or it is not loaded.
            Elsewhere: a process has it.
        """
        engines, exchange = self.engines, CURRENT.get()
        name = name or None
        if self.has_processes:
            raise Elsewhere(self._process(name))
        if name is None:
            claim = None if exchange is None else exchange.claim
            name = next(iter(engines), None) if claim is None else claim.model
        if name is None:
            raise Failure(400, "model_not_loaded", NOT_LOADED, "model")
        name = self.config.aliases.get(name, name)
        if name in engines:
            return ServedModel(name, engines[name])
        base, _, adapter = name.rpartition(":")
        if base in engines:
            engine = engines[base]
            if adapter in {info.name for info in engine.adapters()}:
                return ServedModel(base, engine, {adapter: 1.0})
        if name in self.models:
            raise Failure(400, "model_not_loaded", NOT_LOADED, "model")
        raise self._missing(name)

    def _process(self, name: str | None) -> ServingProcess:
        """The process of the model that *name* stands for; None: the first. Raises Failure."""
        processes = self.processes
        model = next(iter(processes), None) if name is None else self.base_of(name)
        if name is not None and model is None:
            raise self._missing(name)
        if model is None or model not in processes:
            raise Failure(400, "model_not_loaded", NOT_LOADED, "model")
        return processes[model]

    # -- what a request may have --------------------------------------------------------

    def check_texts(self, name: str, n: int) -> None:
        """Raise Failure if the field *name* of a body has too many texts."""
        if n > self.config.max_texts:
            limit = f"at most {self.config.max_texts} are allowed (max_texts)"
            raise refused(name, f"{n} texts are too many: {limit}", "too_many_texts")

    def check_outputs(
        self,
        model: ServedModel,
        n_prompts: int,
        n: int | None,
        name: str | None = None,
    ) -> None:
        """
        Raise Failure if one body asks for so much that all others would have to go.

        Args:
            name: of the field that asks for several outputs of a prompt; None: n.
        """
        info, n_outputs = model.engine.info, n_prompts * (n or 1)
        # Others may still wait beside one that asks for so many outputs.
        max_outputs = info.n_slots + info.config.scheduler.max_waiting // 2
        if n_outputs > max_outputs:
            limit = (
                f"at most {max_outputs} at a time (half of max_waiting, and all slots)"
            )
            reason = f"{n_outputs} outputs are too many for one request: {limit}"
            name = name or ("prompt" if n_prompts > 1 else "n")
            raise refused(name, reason, "too_many_outputs")

    def options_of(self, exchange: Exchange, options: Any) -> Any:
        """
        *options* of a request as its key may have them.

        The client is the owner of the key, so that keys get equal shares whatever names their
        requests give; these are left to a policy of the service, as `policy_data`.
        """
        key, options = exchange.key, options.copy()
        if key is None:
            return options
        if key.name != ADMIN:
            least = self.config.least_priority
            if options.get("priority", least) < least:
                options["priority"] = least
                exchange.ignored.append("priority")
        return options

    def text_options_of(self, exchange: Exchange, options: Any) -> Any:
        """*options* of a request for text as its key may have them, as options_of()."""
        key = exchange.key
        if key is None:
            return options
        options = self.options_of(exchange, options)
        if self.config.salt_by_key:
            options["cache_salt"] = key.salt(options.get("cache_salt"))
        name = options.get("client")
        options["client"] = key.name
        if name is not None:
            options["policy_data"] = {
                "client": name,
                **(options.get("policy_data") or {}),
            }
        return options

    def ended(self, exchange: Exchange, route: str) -> None:
        """Count a request and its tokens, and write it down; *route* is "" if there is none."""
        traffic = self.traffic
        if self.is_behind:
            counts = (exchange.n_prompt, exchange.n_cached, exchange.n_output)
            self.ended_counts[exchange.number] = counts
            while len(self.ended_counts) > MAX_ENDED:
                del self.ended_counts[next(iter(self.ended_counts))]
        method = exchange.method if exchange.method in METHODS else "other"
        traffic.n_requests[method, route, str(exchange.status)] += 1
        traffic.n_left += not exchange.is_whole
        if exchange.refused is not None:
            traffic.n_refused[exchange.refused,] += 1
        n_tokens = exchange.n_prompt + exchange.n_output
        self.rates.charge("tokens", exchange.client, n_tokens)
        if self._log is not None:
            self._log.write(exchange)


def retry_s(engines: Iterable[AsyncEngine]) -> int:
    """Seconds until one of *engines* has a slot for a request that comes now, 1 to 60."""
    soonest = min((engine.queue_s or 0.0 for engine in engines), default=0.0)
    return max(1, min(ceil(soonest), 60))


# -- what became of requests -------------------------------------------------------------


class TextCounter(Watcher):
    """
    Counts tokens of texts that become vectors and ranks, also if their client leaves.

    A call for these has no handle that could be asked later. All of its texts count from when the
    engine has taken it on.

    Thread: that of the engine.
    """

    def came(self, requests: Sequence[Any], submitted: float) -> None:  # noqa: ARG002
        """Count the texts of *requests* for the exchange that they belong to."""
        exchange = CURRENT.get()
        if exchange is not None:
            texts = [request for request in requests if request.lot.makes_vectors]
            exchange.n_prompt += sum(request.n_prompt for request in texts)


class AccessLog:
    """A line of JSON for each request; "-" is the standard output."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if it cannot be written."""
        file = Path("/dev/stdout" if path == "-" else path)
        try:
            self._file = file.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"access_log {path!r}: {error}") from error
        finalize(self, self._file.close)  # an application may be dropped at any time

    def write(self, exchange: Exchange) -> None:
        """Write one line at once, without any text of the request."""
        line = {
            "time": round(time(), 3),
            "id": exchange.request_id,
            "method": exchange.method,
            "path": exchange.path,
            "status": exchange.status,
            "seconds": round(monotonic() - exchange.began, 6),
            "bytes": exchange.n_bytes,
            "left": not exchange.is_whole,
            "model": exchange.model,
            "prompt_tokens": exchange.n_prompt,
            "cached_tokens": exchange.n_cached,
            "output_tokens": exchange.n_output,
            "client": exchange.client or None,
        }
        with suppress(OSError):  # a disk that is full loses lines and no requests
            self._file.write(to_json(line) + b"\n")


class Traffic:
    """
    Counts of requests by the template of their route, as those of keys or ids have no end.

    Thread: of the event loop, as whoever collects is.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.n_requests = Counter[tuple[str, ...]]()
        self.n_refused = Counter[tuple[str, ...]]()
        self.n_left = 0
        # Parts that were left out of chats, by KINDS of conversation.py; texts stand for them.
        self.left_out = Counter[str]()

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        name, text = "pyllama_raw:http_requests", "Requests that have ended"
        yield _counted(name, text, ("method", "route", "status"), self.n_requests)
        name, text = "pyllama_raw:http_refused", "Requests that did not come in"
        yield _counted(name, text, ("reason",), self.n_refused)
        name = "pyllama_raw:http_left_out"
        text = "Parts of chats that are not known here"
        kinds = {(kind,): n for kind, n in self.left_out.items()}
        yield _counted(name, text, ("kind",), kinds)
        name, text = "pyllama_raw:http_requests_in_flight", "Requests in work"
        yield GaugeMetricFamily(name, text, self.in_flight)
        name, text = "pyllama_raw:http_disconnects", "Clients that left before the end"
        yield CounterMetricFamily(name, text, self.n_left)


def _counted(
    name: str, text: str, labels: tuple[str, ...], counts: Mapping[Any, int]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, n in counts.items():
        family.add_metric(values, n)
    return family
