"""
The engines of a service by name, what its requests may have of them, and what became of requests.

A request for text is counted by the admission of its engine, which refuses those beyond its slots
and its queue. The service counts once more, before that: a body that is not read costs next to
nothing, and until a prompt is made no engine knows of the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple, TypeVar
from weakref import finalize

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic_core import to_json

from pyllama_raw import AsyncEngine
from pyllama_raw.errors import ConfigError
from pyllama_raw.results import Operation, Pooling, Watcher
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure, refused
from pyllama_raw.serve.keys import ADMIN, Key, Keys, Rates
from pyllama_raw.serve.reading import DRAINING, Bodies

UNPOOLED = (None, Pooling.NONE, Pooling.RANK)  # of models that are made for no vectors
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
    began: float = field(default_factory=monotonic)


# The exchange that this code works for, also in threads and tasks that it begins. None: the code of
# a program beside the service.
CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


class ServedModel(NamedTuple):
    """The model that a request names."""

    name: str
    engine: AsyncEngine
    adapters: Mapping[str, float] = {}  # of `base:adapter`, each with its scale


# -- all requests ------------------------------------------------------------------------


class Service:
    """The state that all answers share. Thread: that of the event loop."""

    def __init__(self, engines: Mapping[str, AsyncEngine], config: ServeConfig) -> None:
        """Raises ConfigError: a file of the options cannot be used."""
        self.engines, self.config = engines, config
        self.drains = False  # drain() was called
        self.is_llama = config.in_place_of is not None
        # Scales of adapters of each model, for requests that name none.
        self.scales: dict[str, dict[str, float]] = {}
        self.started = int(time())  # Unix time
        self.keys, self.rates = Keys(config), Rates(config)
        infos = {name: engine.info for name, engine in engines.items()}
        media = (info.config.media for info in infos.values())
        has_media = any(options.mmproj is not None for options in media)
        self.bodies, self.traffic = Bodies(config, has_media=has_media), Traffic()
        self._log = None if config.access_log is None else AccessLog(config.access_log)
        for engine in engines.values():
            engine.watch(TextCounter())

        # Options of requests that say nothing else.
        defaults = config.defaults
        self.sampling = {n: getattr(defaults, n) for n in defaults.model_fields_set}
        limits = {"deadline_s": config.deadline_s, "max_wait_s": config.max_wait_s}
        self.time_limits = {
            n: limit for n, limit in limits.items() if limit is not None
        }

        # As many requests with a body are handled as all engines have slots and let wait. One of
        # them may ask for so many outputs that others may still wait beside them.
        self.n_open = 0
        sizes = {
            n: (i.n_slots, i.config.scheduler.max_waiting) for n, i in infos.items()
        }
        self._max_open = sum(map(sum, sizes.values()))
        self._max_outputs = {
            n: slots + waits // 2 for n, (slots, waits) in sizes.items()
        }

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.drains = True
        self.bodies.drain()

    def check_room(self) -> None:
        """Raise Failure if the service is about to end, or handles as many requests as it may."""
        if self.drains:
            raise Failure(503, "server_is_draining", DRAINING)
        if self.n_open >= self._max_open:
            headers = {"retry-after": str(retry_s(self.engines.values()))}
            message = "all places of the queue are taken: try again, or elsewhere"
            raise Failure(503, "server_is_overloaded", message, headers=headers)

    def check_open(self, facts: str | None) -> None:
        """Raise Failure if *facts* are told to nobody."""
        if facts in self.config.closed:
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

    def find(self, name: str | None, need: Operation) -> ServedModel:
        """
        The model that *name* stands for; None: the first that can do what is asked.

        Raises:
            Failure: there is no such model.
            Unsupported: it cannot do this.
        """
        model = None
        if name is not None:
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
        """The model that *name* stands for; None: the first. Raises Failure."""
        name = next(iter(self.engines)) if name is None else name
        name = self.config.aliases.get(name, name)
        if name in self.engines:
            return ServedModel(name, self.engines[name])
        base, _, adapter = name.rpartition(":")
        if base in self.engines:
            engine = self.engines[base]
            if adapter in {info.name for info in engine.adapters()}:
                return ServedModel(base, engine, {adapter: 1.0})
        message = f"there is no model {name!r}: there are {', '.join(self.engines)}"
        raise Failure(404, "model_not_found", message, "model")

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
        max_outputs, n_outputs = self._max_outputs[model.name], n_prompts * (n or 1)
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
    soonest = min(engine.queue_s or 0.0 for engine in engines)
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
