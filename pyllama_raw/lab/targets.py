"""
Targets of calls, and rounds in which they are measured side by side.

`engine` is ours, in this process, through its public API. `openai=URL` and `llama-server=URL` are
servers over streaming HTTP: OpenAI's completions, and llama-server's own protocol. A line of their
answers is noted with its time and read when the answer is whole. libllama leaves nothing of other
programs in the caches, so reading each event at once would take several times as much CPU time
from a server on the same machine. The client here, by httpx, takes some 70 us for each event, the
one of benchmarks/ some 15 (`RawClient`).

Rules of rounds:
1. In each round all targets do the same work, one after the other; the first one rotates.
2. The text of each round and point is new; only what a workload repeats can be cached.
3. A target is open only while it is measured: what idles beside it slows it. Each opening
   begins with calls that do not count, and that logs of the engine mark.
"""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from pydantic_core import from_json, to_json

from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.core.request import FinishReason
from pyllama_raw.engine.logs import WARM_UP
from pyllama_raw.errors import ConfigError, LibraryNotBuilt
from pyllama_raw.lab.arrivals import arrival_times
from pyllama_raw.lab.calls import (
    Call,
    CallFailed,
    Limits,
    Record,
    Result,
    Run,
    Target,
    closed_loop,
    open_loop,
    result_of,
)
from pyllama_raw.lab.workloads import generator
from pyllama_raw.options import __version__
from pyllama_raw.options.config import EngineConfig
from pyllama_raw.options.frozen import Checked, Count, Positive
from pyllama_raw.options.machine import OtherLoad, cpu_name
from pyllama_raw.options.sampling import SamplingParams

COUNTERS = (
    "steps",
    "computed_tokens",
    "preempted",
    "decode_s",
    "sample_s",
    "capture_s",
    "restore_s",
)


def fixed_length(max_tokens: int) -> SamplingParams:
    """Greedy, and exactly so many tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


class EngineTarget:
    """A target that is an engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def send(self, record: Record) -> None:
        call = record.call
        params = fixed_length(call.max_tokens)
        stream = self.engine.generate(record.prompt, params, **call.options)
        async with stream as generation:
            async for delta in generation:
                record.take(len(delta.token_ids), delta.text, delta.token_ids)
        result = generation.result
        record.n_prompt = result.usage.prompt_tokens
        record.n_cached = result.usage.cached_tokens
        record.queue_s = result.timings.queue_s
        if result.finish_reason is FinishReason.DEADLINE:
            came = f"{record.n_output} of {call.max_tokens} tokens came"
            raise CallFailed(f"deadline_s={call.deadline_s} was over when {came}")
        record.check_length()

    def counters(self) -> dict[str, float]:
        """Totals of the engine; what a run adds to them is in its result."""
        stats = asdict(self.engine.stats())
        return {name: stats[name] for name in COUNTERS}


PACKAGE = Path(__file__).resolve().parent
LOOK_S = 0.1  # between two looks at the memory of a process


@dataclass(slots=True)
class Use:
    """Memory and time that a process and its children used while they were watched."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    others_cpus: float | None = None  # kept busy by others than it and this process


@contextmanager
def watching(pid: int | None) -> Iterator[Use]:
    """
    Watch the process *pid*; None: it is not known, and nothing but others_cpus is.

    The use is complete at the end of the block. Memory is looked at ten times a second,
    so a peak between two looks is missed.
    """
    use, done = Use(), threading.Event()
    beside = set() if pid is None else {pid}

    def look() -> None:
        use.peak_rss_bytes = max(use.peak_rss_bytes, _used(pid)[1])

    def keep_looking() -> None:
        while not done.wait(LOOK_S):
            look()

    look()
    thread = threading.Thread(target=keep_looking, name="bench-watch", daemon=True)
    started, before_s = time.monotonic(), _used(pid)[0]
    neighbours = OtherLoad(
        own=lambda: sum(_used(process)[0] for process in {os.getpid(), *beside})
    )
    thread.start()
    try:
        with neighbours.watched():
            yield use
    finally:
        use.wall_s, use.cpu_s = time.monotonic() - started, _used(pid)[0] - before_s
        use.others_cpus = neighbours.cpus
        done.set()
        thread.join()


def _used(pid: int | None) -> tuple[float, int]:
    """CPU time in seconds and resident bytes of a process that may be gone, and its children."""
    cpu_s, rss_bytes = 0.0, 0
    for process in () if pid is None else _family(pid):
        with suppress(psutil.NoSuchProcess), process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += process.memory_info().rss
    return cpu_s, rss_bytes


def _family(pid: int) -> list[psutil.Process]:
    """Children of this process are targets of their own."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        children = [] if pid == os.getpid() else process.children(recursive=True)
        return [process, *children]
    return []


def machine() -> dict[str, object]:
    """The machine and the software that figures are taken on."""
    return {
        "cpu": cpu_name(),
        "n_cpus": os.cpu_count(),
        **_library(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "pyllama_raw": __version__,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _library() -> dict[str, object]:
    """The version of libllama, and what it found beside the CPU, if it is there to ask."""
    try:
        from pyllama_raw.native.libllama import devices, llama_version
    except LibraryNotBuilt:
        return {"devices": [], "llama_cpp": None}
    names = [device.description for device in devices() if device.kind != "cpu"]
    return {"devices": names, "llama_cpp": llama_version()}


def _commit() -> str | None:
    """The commit of the checkout that this package lies in; None if it is installed."""
    command = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


WARM_UP_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class ReadyTarget:
    """A target that is ready, and the process it runs in, if that is known."""

    target: Target
    pid: int | None = None


Opener = Callable[[], AbstractAsyncContextManager[ReadyTarget]]
MakeCalls = Callable[..., list[Call]]  # of a seed, and of a length of prompts


@dataclass(frozen=True, slots=True)
class Point(Checked):
    """One way to send the calls: by clients, at a rate, or at the calls' own times."""

    clients: Count | None = None
    rate: Positive | None = None  # calls a second
    burstiness: Positive = 1.0
    prompt_tokens: Count | None = None  # of each call; None: as the workload has it

    async def run(self, target: Target, calls: list[Call], seed: object) -> Run:
        if self.clients is not None:
            return await closed_loop(target, calls, self.clients)
        if self.rate is not None:
            rng = generator(seed, "arrivals")
            times = arrival_times(rng, len(calls), self.rate, self.burstiness)
            calls = [
                replace(call, at_s=at_s)
                for call, at_s in zip(calls, times, strict=True)
            ]
        return await open_loop(target, calls)

    def keys(self) -> Result:
        """As vLLM names them."""
        return {
            "max_concurrency": self.clients,
            "request_rate": "inf" if self.clients else self.rate,
            "burstiness": self.burstiness,
            "prompt_tokens": self.prompt_tokens,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a measurement."""

    openers: Mapping[str, Opener]  # by the name of the target
    points: Sequence[Point]
    make_calls: MakeCalls
    rounds: int = 5
    warm_up: int = 8  # calls after each opening
    seed: int = 0
    limits: Limits = field(default_factory=dict)

    async def results(self) -> AsyncIterator[Result]:
        """One for each round, target and point, as soon as it is there."""
        names = list(self.openers)
        for index in range(self.rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                async with self.openers[name]() as ready:
                    await self._warm_up(ready.target, index)
                    for point in self.points:
                        result = await self._measure(ready, point, index)
                        yield {"target": name, "round": index} | result

    async def _warm_up(self, target: Target, index: int) -> None:
        if self.warm_up:
            calls = self.make_calls((self.seed, "warm up", index))[: self.warm_up]
            await closed_loop(target, list(map(_warming, calls)), WARM_UP_CLIENTS)

    async def _measure(self, ready: ReadyTarget, point: Point, index: int) -> Result:
        seed = (self.seed, index, point)
        sizes = () if point.prompt_tokens is None else (point.prompt_tokens,)
        calls = self.make_calls(seed, *sizes)
        before = _counters(ready.target)
        with watching(ready.pid) as use:
            run = await point.run(ready.target, calls, seed)
        after = _counters(ready.target)
        has_process = ready.pid is not None
        return {
            **point.keys(),
            "num_prompts": len(calls),
            **result_of(run, self.limits),
            "peak_rss_bytes": use.peak_rss_bytes if has_process else None,
            "cpu_s": use.cpu_s if has_process else None,
            "cpu_includes_client": ready.pid == os.getpid(),
            "others_cpus": use.others_cpus if has_process else None,
            "engine": {name: after[name] - before[name] for name in after},
        }


def _warming(call: Call) -> Call:
    """*call* of nobody and as soon as possible."""
    return replace(call, priority=0, deadline_s=None, client=None, policy_data=WARM_UP)


def _counters(target: Target) -> dict[str, float]:
    return target.counters() if isinstance(target, EngineTarget) else {}


API_KEY = "OPENAI_API_KEY"


class HttpTarget(ABC):
    """The common part of both protocols."""

    path: str

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    @abstractmethod
    def body(self, record: Record) -> dict[str, Any]:
        """The JSON object that is posted."""

    @abstractmethod
    def take(self, record: Record, event: dict[str, Any], at: float) -> None:
        """Write what *event* brought, *at* that time, into *record*."""

    async def send(self, record: Record) -> None:
        heard: list[tuple[float, bytes]] = []  # when, what; not read yet

        def hear(line: bytes) -> None:
            heard.append((perf_counter(), line))
            if record.on_tokens is not None:  # somebody waits for tokens
                self._read(record, heard)

        try:
            await self._client.post(self.path, self.body(record), hear)
        except (HttpFailed, OSError) as error:
            self._read(record, heard)  # what came before counts
            raise CallFailed(f"{type(error).__name__}: {error}") from error
        self._read(record, heard)
        record.check_length()

    def _read(self, record: Record, heard: list[tuple[float, bytes]]) -> None:
        """Write into *record* what was *heard*, and forget that."""
        lines, heard[:] = heard[:], []
        for at, line in lines:
            if record.left:
                break
            if line.startswith(b"error:"):
                raise CallFailed(line.decode(errors="replace"))
            if line.startswith(b"data: {"):
                event = from_json(line[6:])
                if "error" in event:
                    raise CallFailed(str(event["error"]))
                self.take(record, event, at)


class OpenAITarget(HttpTarget):
    """
    /v1/completions. A chunk counts as one token until the usage at the end says how many
    there were.
    """

    path = "/v1/completions"

    def __init__(
        self,
        client: HttpClient,
        model: str = "default",  # most servers have one, and take any name
        forbidden: Iterable[int] = (),
    ) -> None:
        """
        Args:
            forbidden: tokens that end the generation, for servers that do not know
                ignore_eos.
        """
        super().__init__(client)
        self._model = model
        self._bias = {str(token): -100 for token in forbidden}

    def body(self, record: Record) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": record.prompt,
            "max_tokens": record.call.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return body | ({"logit_bias": self._bias} if self._bias else {})

    def take(self, record: Record, event: dict[str, Any], at: float) -> None:
        for choice in event.get("choices", ()):
            # The last chunk may only say why it is the last.
            if choice.get("text") or not choice.get("finish_reason"):
                record.take(1, choice.get("text") or "", at=at)
        if usage := event.get("usage"):
            record.n_output = usage["completion_tokens"]
            record.n_prompt = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.n_cached = details.get("cached_tokens", record.n_cached)


class LlamaServerTarget(HttpTarget):
    """/completion of llama-server and of what is built around it."""

    path = "/completion"

    def body(self, record: Record) -> dict[str, Any]:
        return {
            "prompt": record.prompt,
            "n_predict": record.call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
        }

    def take(self, record: Record, event: dict[str, Any], at: float) -> None:
        if tokens := event["tokens"]:
            record.take(len(tokens), event["content"], tokens, at)
        if event["stop"]:
            timings = event["timings"]
            record.n_cached = timings["cache_n"]
            record.n_prompt = timings["cache_n"] + timings["prompt_n"]


async def first_model(client: HttpClient) -> str:
    """The first model that the server lists; "default" if it does not list any."""
    lines: list[bytes] = []
    try:
        await client.get("/v1/models", lines.append)
        models = from_json(b"\n".join(lines))["data"]
        return str(models[0]["id"]) if models else "default"
    except (HttpFailed, OSError, KeyError, TypeError, ValueError):
        return "default"  # if it is not there at all, the calls will tell


@asynccontextmanager
async def http_target(url: str, protocol: str) -> AsyncIterator[HttpTarget]:
    """
    A client of the server at *url*; $OPENAI_API_KEY is sent to it if it is set.

    Args:
        protocol: "openai" or "llama-server".
    """
    key = os.environ.get(API_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with open_client(url, headers) as client:
        yield await target_of(client, protocol)


async def target_of(
    client: HttpClient, protocol: str, forbidden: Iterable[int] = ()
) -> HttpTarget:
    """The target that speaks *protocol* by *client*. Args: see http_target() and OpenAITarget."""
    if protocol == "openai":
        return OpenAITarget(client, await first_model(client), forbidden)
    return LlamaServerTarget(client)


TIMEOUT_S = 600.0  # without a byte

OnLine = Callable[[bytes], object]


class HttpFailed(Exception):
    """The server said no, or something that is not HTTP."""


class HttpClient:
    """Requests to one server, each by a connection of its own: servers drop idle ones."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str, on_line: OnLine) -> None:
        """Like post(), without a body."""
        await self.exchange("GET", path, b"", on_line)

    async def post(self, path: str, body: object, on_line: OnLine) -> None:
        """
        Send *body* as JSON, and wait for the end of the answer.

        Args:
            on_line: called with each line, without its end, when it has come.

        Raises:
            HttpFailed, OSError: there is no answer, or not all of it, or its status is not
                2xx.
            Exception: what *on_line* raised.
        """
        await self.exchange("POST", path, to_json(body), on_line)

    async def exchange(
        self, method: str, path: str, content: bytes, on_line: OnLine
    ) -> None:
        """Like post(), of bytes; another client may do this in another way."""
        try:
            async with self._client.stream(method, path, content=content) as answer:
                if not answer.is_success:
                    text = (await answer.aread()).decode(errors="replace")
                    raise HttpFailed(f"status {answer.status_code}: {text[:200]}")
                await _tell_lines(answer, on_line)
        except httpx.HTTPError as error:
            raise HttpFailed(f"{type(error).__name__} {error}") from error


async def _tell_lines(answer: httpx.Response, on_line: OnLine) -> None:
    """Split at newlines alone: JSON may hold what Python, and httpx, call other ends of lines."""
    tail = b""
    async for part in answer.aiter_bytes():
        *lines, tail = (tail + part).split(b"\n")
        for line in lines:
            on_line(line)
    if tail:
        on_line(tail)


@asynccontextmanager
async def open_client(url: str, headers: dict[str, str]) -> AsyncIterator[HttpClient]:
    """A client of the server at *url*; the environment's proxies are not asked."""
    async with httpx.AsyncClient(
        base_url=url,
        headers=headers
        | {"Content-Type": "application/json", "Accept-Encoding": "identity"},
        timeout=TIMEOUT_S,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    ) as client:
        yield HttpClient(client)


PROTOCOLS = ("openai", "llama-server")


def opener(spec: str, model: Path, config: EngineConfig) -> Opener:
    """
    Raises:
        ConfigError: *spec* names no target.
    """
    if spec == "engine":
        return partial(open_engine, model, config)
    protocol, _, url = spec.partition("=")
    if protocol not in PROTOCOLS or not url.startswith(("http://", "https://")):
        raise ConfigError(f"target={spec!r}: give engine, openai=URL, llama-server=URL")
    return partial(open_server, url, protocol)


@asynccontextmanager
async def open_engine(model: Path, config: EngineConfig) -> AsyncIterator[ReadyTarget]:
    """Our engine in this process."""
    async with AsyncEngine.open(model, config) as engine:
        yield ReadyTarget(EngineTarget(engine), os.getpid())


@asynccontextmanager
async def open_server(url: str, protocol: str) -> AsyncIterator[ReadyTarget]:
    """A server that runs already; see http_target."""
    async with http_target(url.rstrip("/"), protocol) as target:
        yield ReadyTarget(target)
