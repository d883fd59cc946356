"""
Models of a service in processes of their own: what aborts there, a driver or a model, takes nothing along.

Such a process is the same service with one model. The service in front checks keys and limits, loads
the model for a request, and sends the request on as it came; the answer comes back as it is.

Rules:
1. A process is a `SpawnedRunner` of the cache of models: it listens on this machine only, has a random
   key, and ends with this one. Who has sent a request stands in a header beside that key.
2. This process asks no device for anything: another one, which ends at once, tells what devices there are
   and what a model takes.
3. The end of a process ends its requests: with a 503 and Retry-After if nothing of the answer was sent,
   with an error as its last event if it is a stream, and else without an end. The cache loads the model again.
4. An event is sent whole or not at all.
5. The service in front counts tokens of a request as the process tells them when it has ended.
6. The path that was checked here is the one that is asked for there: no part of it is resolved on the way.
"""

from __future__ import annotations

import json
import logging
import os
import re
import string
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from time import monotonic
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import anyio
from anyio import create_task_group, fail_after, move_on_after
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyllama_raw import EngineConfig, devices, estimate_memory
from pyllama_raw.api.model import fit_memory
from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
    ModelUnavailable,
    PyllamaError,
    first_of,
)
from pyllama_raw.options.machine import interpreter
from pyllama_raw.runners.errors import (
    NetworkError,
    RunnerFault,
    RunnerTimeout,
    as_json,
    from_json,
)
from pyllama_raw.runners.remote import PYLLAMA, Dialect
from pyllama_raw.runners.runner import RunnerHealth, RunnerMemory
from pyllama_raw.runners.spawned import SpawnedRunner, check_interpreter
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.deployment import AdapterEntry, Deployment
from pyllama_raw.serve.failures import MESSAGES, Failure, failure_of, refused
from pyllama_raw.serve.keys import SENDER_HEADER, VARIABLE
from pyllama_raw.serve.service import Exchange, Service

logger = logging.getLogger(__name__)
Prepare = Callable[
    [str | None, EngineConfig | None], tuple[str | None, EngineConfig | None]
]
CONTENT = "PYLLAMA_RAW_PROCESS"  # the variable that says what a process is to do
ANSWER = "PYLLAMA_RAW_ANSWER "  # begins the line of an answer
FRACTION = re.compile(r"^loaded (\d\.\d+)$", re.MULTILINE)
HOST = "CPU"
PROCESS_BYTES = 96 * 2**20  # of host memory, beside what libllama takes
START_S = 3600.0  # for a model to load, or to say what it will take
HEALTH_S = 30.0  # for a process to say that it is well
FACTS_S = 2.0  # for what a process says of itself
STATE_S = 0.5  # for whether it is well, where a probe waits for that
WELL = "ok"
MAX_LINES, LINES_S = 100, 10.0  # lines of a process that are logged in so many seconds
ASKED = ("loaded ", "serving at ")  # begins lines that this process waits for
LOOK_S = 0.25  # between two looks how far a load is
RETRY_S = 1.0
RESPONSES = "/responses"
MAX_ADDRESS = (
    2**15
)  # characters of a path and a query; the library sends no more than 2**16
# What stands in an address as it is; "#" would end it.
PLAIN = (string.ascii_letters + string.digits + string.punctuation).replace("#", "")
# Headers of a connection, and of the way to this service.
NOT_SENT_ON = {
    *("host", "connection", "keep-alive", "transfer-encoding", "upgrade", "te"),
    *("trailer", "content-length", "accept-encoding", "authorization", "x-api-key"),
    *("proxy-authorization", "cookie", "expect", "x-request-id", SENDER_HEADER),
}
NOT_SENT_BACK = {
    *("connection", "keep-alive", "transfer-encoding", "upgrade", "trailer"),
    *("date", "server", "x-request-id", "request-id"),
}


# -- what a process is to be -------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ProcessModel:
    """A model that is to have a process, with what it takes, once somebody has asked."""

    name: str
    path: str | None
    config: EngineConfig | None
    adapters: tuple[AdapterEntry, ...]
    service: ServeConfig
    room: Mapping[str, int]
    prepare: Prepare | None
    _memory: RunnerMemory | None = None
    _sizing: anyio.Lock = field(default_factory=anyio.Lock)

    async def memory(self) -> RunnerMemory:
        """What it takes, as another process reckons; from then on its options fit the room."""
        async with self._sizing:
            if self._memory is None:
                answer = await ask(
                    {
                        "path": self.path,
                        "config": self.config and as_fields(self.config),
                        "prepare": name_of(self.prepare),
                        "room": dict(self.room),
                    }
                )
                self.path = answer["path"]
                self.config = EngineConfig.model_validate(answer["config"])
                loaded, n_bytes = (
                    dict(answer["loaded"]),
                    answer["asleep"] + PROCESS_BYTES,
                )
                loaded[HOST] = loaded.get(HOST, 0) + PROCESS_BYTES
                self._memory = RunnerMemory(loaded, {HOST: n_bytes})
            return self._memory

    @property
    def n_places(self) -> int:
        """Requests that it has slots for, and that may wait for one."""
        scheduler = (self.config or EngineConfig()).scheduler
        return scheduler.n_slots + scheduler.max_waiting

    def deployment(self) -> Deployment:
        """The service of the process."""
        # Keys, budgets, logs and browsers are the business of the service in front.
        own: dict[str, Any] = {"api_keys_file": None, "requests_per_minute": None}
        own |= {"tokens_per_minute": None, "access_log": None, "cors_origins": ()}
        names = {a: n for a, n in self.service.aliases.items() if n == self.name}
        own |= {"aliases": names, "metrics_names": ("vllm",)}
        return Deployment(
            port=0,
            service=self.service.model_copy(update=own),
            models={self.name: self.path},
            configs={self.name: self.config or EngineConfig()},
            adapters={self.name: self.adapters} if self.adapters else {},
        )


@dataclass(frozen=True, slots=True)
class ProcessProgram:
    """The program of a model, as a SpawnedRunner starts it."""

    model: ProcessModel
    dialect: Dialect = PYLLAMA

    @property
    def name(self) -> str:
        """The model, in errors."""
        return f"the process of {self.model.name}"

    @property
    def served_name(self) -> str:
        """The name of the model."""
        return self.model.name

    def check(self) -> None:
        """Raise ConfigError if there is no Python to start."""
        check_interpreter(self.name)

    async def command(self) -> list[str]:
        """By the Python of this process."""
        await self.model.memory()  # its options fit the room from then on
        return [interpreter(), "-c", "from pyllama_raw.serve.run import child; child()"]

    def environment(self, key: str) -> dict[str, str]:
        """Its key, and what it is to be."""
        content = self.model.deployment().model_dump_json(exclude_unset=True)
        return {VARIABLE: key, CONTENT: content}


def deployment_here() -> Deployment:
    """The service that this process is to be, by its environment."""
    return Deployment.model_validate_json(os.environ.pop(CONTENT))


def report(_: str, fraction: float) -> None:
    """Say how far the model of this process is loaded."""
    sys.stdout.write(f"loaded {fraction:.3f}\n")
    sys.stdout.flush()


# -- questions that need the library -------------------------------------------------------


async def device_bytes() -> dict[str, tuple[int, int]]:
    """Bytes of each device, all and free, as another process sees them. Raises PyllamaError."""
    answer = await ask({})
    return {name: (total, free) for name, total, free in answer["devices"]}


def as_fields(config: EngineConfig) -> dict[str, Any]:
    """*config* as JSON has it."""
    return config.model_dump(mode="json", exclude_unset=True)


def name_of(prepare: Prepare | None) -> str | None:
    """A function of a module, by which another process finds it. None: there is none."""
    return None if prepare is None else f"{prepare.__module__}:{prepare.__qualname__}"


async def ask(order: Mapping[str, Any]) -> Any:
    """The answer of a process to *order*. Raises PyllamaError."""
    try:
        command = [
            interpreter(),
            "-c",
            "from pyllama_raw.serve import processes as p; p.answer()",
        ]
        environment = {**os.environ, CONTENT: json.dumps(order)}
        with anyio.fail_after(START_S):
            ran = await anyio.run_process(
                command, stdout=PIPE, stderr=PIPE, env=environment, check=False
            )
    except TimeoutError as error:  # before OSError, which it is one of
        raise PyllamaError(
            f"a process that asks the devices did not answer within {START_S:g} s, and was killed"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"a process that asks the devices: {error}") from error
    lines = ran.stdout.decode(errors="replace").splitlines()
    answers = [line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)]
    if not answers:
        reason = ran.stderr.decode(errors="replace")[-500:]
        raise PyllamaError(
            f"a process that asks the devices ended with {ran.returncode}: {reason}"
        )
    answer = json.loads(answers[-1])
    if "error" in answer:
        raise from_json(answer["error"])
    return answer


def answer() -> None:
    """Answer the order in the environment, on the standard output; the whole of such a process."""
    order, result = json.loads(os.environ.pop(CONTENT)), dict[str, Any]()
    try:
        if "config" in order:
            path, config = order["path"], None
            if order["config"] is not None:
                config = EngineConfig.model_validate(order["config"])
            # It looks into the file, which may end a process.
            if order["prepare"] is not None:
                module, _, name = order["prepare"].partition(":")
                path, config = getattr(import_module(module), name)(path, config)
            config = fit_memory(path, config or EngineConfig(), order["room"])
            parts = estimate_memory(path, config).devices
            result |= {"path": path, "config": as_fields(config)}
            result["loaded"] = {part.device: part.total_bytes for part in parts}
            result["asleep"] = sum(part.kv_bytes for part in parts)
        else:
            result["devices"] = [
                (device.name, device.memory_total_bytes, device.memory_free_bytes)
                for device in devices()
                if device.kind in ("cpu", "gpu", "igpu")
            ]
    except PyllamaError as error:
        result = {"error": as_json(error)}
    sys.stdout.write(f"\n{ANSWER}{to_json(result).decode()}\n")


# -- a process -----------------------------------------------------------------------------


class ModelProcess(SpawnedRunner):
    """The process of a model: a runner of the cache, to which requests are sent on."""

    stop_s = 3.0  # in which it may write prefixes to files

    def __init__(
        self, model: ProcessModel, progress: Callable[[float], object]
    ) -> None:
        super().__init__(ProcessProgram(model), name=model.name, start_s=START_S)
        self.model, self._progress = model, progress
        self.hears = Lines(model.name)

    @property
    def n_places(self) -> int:
        """Requests that it has slots for, and that may wait for one."""
        return self.model.n_places

    async def memory(self) -> RunnerMemory:
        """What libllama reckons, and the process itself."""
        return await self.model.memory()

    async def start(self) -> None:
        """Start the process; tells how far its model is loaded."""
        try:
            async with create_task_group() as group:
                group.start_soon(self._watch_load)
                await super().start()
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None

    async def health(self) -> RunnerHealth:
        """
        Whether its engine makes progress, as /livez tells; a busy process takes its time for that.

        One that says that it hangs, or nothing at all, is ended, because its requests would never be.
        """
        state = await self.state(HEALTH_S)
        is_well, child = state == WELL, self._child
        if not is_well and child is not None:
            await child.end(0.0)
        return RunnerHealth(is_well, is_well, self.n_open, detail=state)

    async def state(self, limit_s: float = STATE_S) -> str:
        """What it says of its engine within *limit_s*: `ok`, or `stalled`; else `silent`."""
        with suppress(PyllamaError, ValueError, LookupError), move_on_after(limit_s):
            while True:
                # A connection that fails may be the fault of this process, which has no descriptor left.
                with suppress(NetworkError, RunnerTimeout):
                    async with self.exchange("GET", "/livez") as response:
                        return str(json.loads(await response.aread())["status"])
                await anyio.sleep(LOOK_S)
        return "silent"

    async def sleep(self) -> None:
        """Have its engine sleep; the process stays, with what the context held."""
        await self._command("sleep")

    async def wake(self) -> None:
        """Have its engine go on."""
        await self._command("wake")

    async def fact(self, path: str) -> Any:
        """What it answers to GET *path*: JSON, or text; None: nothing within FACTS_S."""
        with suppress(PyllamaError, ValueError), move_on_after(FACTS_S):
            async with self.exchange("GET", path) as response:
                content = await response.aread()
                if response.status_code == 200:
                    is_json = "json" in response.headers.get("content-type", "")
                    return json.loads(content) if is_json else content.decode()
        return None

    async def metrics(self) -> list[Metric] | None:
        """The families that it tells of its engine. None: it tells nothing within FACTS_S."""
        text = await self.fact("/metrics")
        if text is None:
            return None
        families = text_string_to_metric_families(text)
        return [f for f in families if not f.name.startswith("pyllama_raw:http_")]

    def sent_on(self, request: Request, service: Service) -> Response:
        """The answer of the process to *request*."""
        return SentOn(self, request, service)

    # -- inside ----------------------------------------------------------------------------

    async def _command(self, verb: str) -> None:
        """Have the process do what a client cannot ask for. Raises PyllamaError."""
        async with self.exchange("POST", f"/process/{verb}", b"{}") as response:
            content = await response.aread()
        if response.status_code != 200:
            raise from_json(json.loads(content)["failure"])

    async def _watch_load(self) -> None:
        while True:
            await anyio.sleep(LOOK_S)
            child = self._child
            fractions = [] if child is None else FRACTION.findall(child.said)
            if fractions:
                self._progress(float(fractions[-1]))


class Lines:
    """Lines that a process writes, for the log of this one, with its name: so many in a while, and no more."""

    def __init__(self, name: str, clock: Callable[[], float] = monotonic) -> None:
        self._name, self._clock = name, clock
        self._n, self._since = 0, -inf

    def __call__(self, line: str) -> None:
        """Log a line that is none of those that this process asked for."""
        if not line or line.startswith(ASKED):
            return
        now = self._clock()
        if now - self._since > LINES_S:
            if self._n > MAX_LINES:
                n_more = self._n - MAX_LINES
                logger.warning("%s: %d more lines are left out", self._name, n_more)
            self._n, self._since = 0, now
        self._n += 1
        if self._n <= MAX_LINES:
            logger.warning("%s: %s", self._name, line)


class SentOn(Response):
    """The answer of a process to a request that was sent on, part by part."""

    def __init__(
        self, process: ModelProcess, request: Request, service: Service
    ) -> None:
        super().__init__()
        self._process, self._service, scope = process, service, request.scope
        self._exchange: Exchange = request.state.exchange
        self._number = uuid4().hex
        self._address, self._method = address_of(scope), request.method
        headers = headers_of(request)
        headers["x-request-id"] = self._exchange.request_id
        headers["accept-encoding"] = "identity"
        headers[SENDER_HEADER] = sender_of(self._exchange, self._number)
        # A stream may be long, and is to keep no body that was sent.
        self._body: list[bytes] = []
        if content := self._exchange.content:
            headers["content-length"] = str(len(content))
            self._body, self._exchange.content = [content], b""
        self._sent_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return when all is sent; leaving it ends the request there."""
        exchange, has_begun, is_stream = self._exchange, False, False
        body = self._parts() if self._body else None
        exchange.model = self._process.name
        if len(self._address) > MAX_ADDRESS:
            reason = (
                f"the address is too long: at most {MAX_ADDRESS} characters are allowed"
            )
            await refused("query", reason).answer(scope["path"])(scope, receive, send)
            return
        try:
            async with self._process.exchange(
                self._method, self._address, body, self._sent_headers
            ) as response:
                kind = response.headers.get("content-type", "")
                is_stream, has_begun = kind.startswith("text/event-stream"), True
                await self._begin(response, send)
                half = b""  # of an event, which stays here: an error may have to follow
                async for part in response.aiter_raw():
                    half += part
                    end = half.rfind(b"\n\n") + 2 if is_stream else len(half)
                    if end > 1:
                        await self._send(send, half[:end])
                        half = half[end:]
            await send({"type": "http.response.body", "body": half})
        except (RunnerFault, ClosedError) as error:
            failure = self._failure(error)
            exchange.refused = failure.code
            if not has_begun:
                await failure.answer(scope["path"])(scope, receive, send)
            elif is_stream:
                await self._send(send, last_event(failure, scope["path"]))
                await send({"type": "http.response.body", "body": b""})
            else:
                raise
        except TimeoutError:  # nobody reads what is sent
            pass
        finally:
            with anyio.CancelScope(shield=True):
                await self._count()

    async def _parts(self) -> AsyncIterator[bytes]:
        """The body, which then nobody has any more."""
        yield self._body.pop()

    async def _begin(self, response: Any, send: Send) -> None:
        # The process names the fields that change nothing, which were looked for here, too.
        self._exchange.ignored.clear()
        headers = [
            (name.lower(), value)
            for name, value in response.headers.raw
            if name.lower().decode("latin-1") not in NOT_SENT_BACK
        ]
        status = response.status_code
        if status in (429, 503):
            self._exchange.refused = "refused_by_process"
        await send(
            {"type": "http.response.start", "status": status, "headers": headers}
        )

    async def _send(self, send: Send, part: bytes) -> None:
        with fail_after(self._service.config.send_s):
            await send({"type": "http.response.body", "body": part, "more_body": True})

    def _failure(self, error: PyllamaError) -> Failure:
        reason = f"its process failed ({error.code}) while it served this: try again"
        name = self._process.name
        return failure_of(ModelUnavailable(name, reason, RETRY_S), 1)

    async def _count(self) -> None:
        """Take over the counts of tokens, where somebody wants them."""
        if not self._service.counts_tokens:
            return
        exchange = self._exchange
        counts = await self._process.fact(f"/process/exchanges/{self._number}")
        if counts is not None:
            exchange.n_prompt, exchange.n_cached, exchange.n_output = counts


def address_of(scope: Scope) -> str:
    """The path and the query of a request, of which nobody on the way resolves or reads a part anew."""
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    # A client of HTTP would take "a/../b" for "b", for which nobody has checked a right.
    parts = [
        part.replace(".", "%2e") if part in (".", "..") else part
        for part in quote(path, safe=PLAIN).split("/")
    ]
    address = "/".join(parts).removeprefix(scope.get("root_path", ""))
    query = scope.get("query_string", b"")
    return f"{address}?{quote(query, safe=PLAIN)}" if query else address


def headers_of(request: Request) -> dict[str, str | bytes]:
    """The headers of a request that are sent on, byte for byte."""
    # A client may name headers that are for its connection only.
    names = request.headers.get("connection", "").lower().split(",")
    not_sent = NOT_SENT_ON.union(map(str.strip, names))
    headers = ((n.decode("latin-1"), v) for n, v in request.headers.raw)
    return {name: value for name, value in headers if name not in not_sent}


def sender_of(exchange: Exchange, number: str) -> str:
    """The header by which a process knows who has sent a request, and its *number*."""
    key = exchange.key
    facts = None if key is None else [key.name, key.digest.hex()]
    return json.dumps([number, facts])


def last_event(failure: Failure, path: str) -> bytes:
    """An error as the last event of a stream, in the words of the dialect at *path*."""
    kind, body = "", failure.body()
    if MESSAGES in path:
        kind, body = "event: error\n", failure.of_message()
    elif path.endswith(RESPONSES):
        error = {"code": "server_error", "message": failure.message}
        kind = "event: response.failed\n"
        body = {
            "type": "response.failed",
            "response": {"status": "failed", "error": error},
        }
    return f"{kind}data: {to_json(body).decode()}\n\n".encode()
