"""
What a flood of requests does to those that run: refusals, gaps of streams, memory.

`pyllama-raw serve` with 8 slots and 64 places to wait, in a process of its own. First the
baseline: as many streams as it has slots, always. Then requests come at a fixed rate,
whether or not others are answered, while as many streams go on; gaps count until the last
request has come. Each refusal must say when to come again, and each stream that was taken
must have all its tokens. --step-ms serves an engine that computes nothing and takes that
long for a step, so that what HTTP costs is seen alone. All takes about a minute.

The engine keeps no prefixes outside of its cells, and the baseline has used all of these, so
that what memory grows by is of requests that come.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import psutil
import uvicorn
from load.measure import NO_DRAFTS, Report, arguments, parse, percentile, say
from peers import Url, free_port, serving
from peers.ours import pyllama_raw_server
from pydantic_core import from_json, to_json

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SchedulerConfig,
)
from pyllama_raw.serve import make_app
from pyllama_raw.serve.run import OPTIONS
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits

N_SLOTS, MAX_WAITING, N_TOKENS = 8, 64, 64
N_CTX_SLOT = 256
SCHEDULER = SchedulerConfig(n_slots=N_SLOTS, max_waiting=MAX_WAITING)
ASKED = {"stream": True, "max_tokens": N_TOKENS, "ignore_eos": True}


def fake(options: Namespace) -> AsyncEngine:
    """An engine that computes nothing."""
    executor = FakeExecutor(
        fake_limits(
            n_slots=N_SLOTS, n_ctx_slot=512, n_batch=512, n_cells=512 * N_SLOTS
        ),
        on_step=lambda *_: time.sleep(options.step_ms / 1e3),
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return fake_engine(executor, chat_template=template, max_waiting=MAX_WAITING)


async def answer(options: Namespace) -> None:
    """The server of an engine that computes nothing, until it is killed."""
    async with fake(options) as engine:
        settings = uvicorn.Config(
            make_app({"a": engine}), port=options.serve, **OPTIONS
        )
        await uvicorn.Server(settings).serve()


def server(options: Namespace) -> AbstractContextManager[Url]:
    """The server, in a process of its own."""
    if not options.step_ms:
        context = ContextConfig(n_ctx=N_CTX_SLOT * N_SLOTS, n_threads=options.threads)
        cache = CacheConfig(mode="live")
        config = EngineConfig(
            speculation=NO_DRAFTS, context=context, scheduler=SCHEDULER, cache=cache
        )
        return pyllama_raw_server(options.model, config)
    port = free_port()
    command = [sys.executable, str(Path(__file__)), "--serve", str(port)]
    command += ["--model", str(options.model), "--step-ms", str(options.step_ms)]
    return serving(command, port)


@dataclass
class Answers:
    """What clients saw."""

    gaps_s: list[float] = field(default_factory=list)
    counts_gaps: bool = True
    refused_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    n_wrong: int = 0  # refusals that do not say when to come again
    n_lost: int = 0  # streams that are not whole
    late_s: float = 0.0  # the longest time that the flood was behind itself
    cpu_s: list[float] = field(default_factory=list)  # of client and server
    rss_bytes: list[int] = field(default_factory=list)


class Clients:
    """Clients of one server, whose connections are used again."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._idle: list[anyio.abc.SocketStream] = []
        self._number = 0

    async def ask(self, answers: Answers) -> None:
        """One request to its end."""
        wire = self._idle.pop() if self._idle else await self._connected()
        began = time.perf_counter()
        await wire.send(self._request())
        data = await wire.receive()
        while b"\r\n\r\n" not in data:
            data += await wire.receive()
        head, _, data = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        answers.statuses[status] += 1
        if status == 200:
            await self._read(wire, data, answers)
        else:
            answers.refused_s.append(time.perf_counter() - began)
            lines = [line.partition(b": ") for line in head.lower().split(b"\r\n")]
            headers = {name: value for name, _, value in lines}
            n_bytes = int(headers[b"content-length"])
            while len(data) < n_bytes:
                data += await wire.receive()
            answers.n_wrong += status != 503 or b"retry-after" not in headers
        self._idle.append(wire)

    async def _connected(self) -> anyio.abc.SocketStream:
        assert self._host is not None
        assert self._port is not None
        return await anyio.connect_tcp(self._host, self._port)

    def _request(self) -> bytes:
        """Each has a prompt of its own."""
        self._number += 1
        message = {"role": "user", "content": f"{self._number}: say something."}
        usage = {"stream_options": {"include_usage": True}}
        body = to_json({"messages": [message], **ASKED, **usage})
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        head += "content-type: application/json\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body

    async def _read(
        self, wire: anyio.abc.SocketStream, data: bytes, answers: Answers
    ) -> None:
        """A stream; the gaps are between arrivals of text."""
        last: float | None = None
        tail = data
        while not tail.endswith(b"0\r\n\r\n"):
            part = await wire.receive()
            now = time.perf_counter()
            if b'"content":"' in part:
                if last is not None and answers.counts_gaps:
                    answers.gaps_s.append(now - last)
                last = now
            tail = (tail + part)[-4096:]
        usage = [line for line in tail.split(b"\n") if b'"completion_tokens"' in line]
        usage_fields = from_json(usage[-1].removeprefix(b"data: ")) if usage else {}
        n_tokens = usage_fields.get("usage", {}).get("completion_tokens")
        answers.n_lost += n_tokens != N_TOKENS or b"data: [DONE]" not in tail


async def baseline(clients: Clients, n: int) -> Answers:
    """Streams alone: a slot each, one after the other."""
    answers = Answers()

    async def go_on() -> None:
        for _ in range(n):
            await clients.ask(answers)

    async with anyio.create_task_group() as group:
        for _ in range(N_SLOTS):
            group.start_soon(go_on)
    return answers


def cpu_times(server: psutil.Process) -> tuple[float, float]:
    """Seconds of the client, which is this process, and of the server."""
    spent = server.cpu_times()
    return time.process_time(), spent.user + spent.system


async def flood(clients: Clients, options: Namespace, pid: int) -> Answers:
    """Requests at a fixed rate; then the end of those that were taken."""
    answers, process = Answers(), psutil.Process(pid)
    began = time.perf_counter()
    cpu_s = cpu_times(process)
    async with anyio.create_task_group() as group:
        for number in range(options.requests):
            due = began + number / options.rate
            ahead_s = due - time.perf_counter()
            await anyio.sleep(max(ahead_s, 0))  # answers are read even if it is late
            answers.late_s = max(answers.late_s, -ahead_s)
            group.start_soon(clients.ask, answers)
            if number % options.rate == 0:
                answers.rss_bytes.append(process.memory_info().rss)
        answers.counts_gaps = False
        after_s = cpu_times(process)
        answers.cpu_s = [b - a for a, b in zip(cpu_s, after_s, strict=True)]
    answers.rss_bytes.append(process.memory_info().rss)
    return answers


async def measure(options: Namespace, report: Report, url: str, pid: int) -> None:
    """The baseline, the flood, and the baseline once more."""
    clients = Clients(url)
    await baseline(clients, 1)
    before = await baseline(clients, options.streams)
    say("the flood")
    during = await flood(clients, options, pid)
    after = await baseline(clients, options.streams)
    alone_s = percentile(before.gaps_s + after.gaps_s, 99)
    for name, answers in (("alone", before), ("flood", during), ("after", after)):
        report.add(
            load=name,
            taken=answers.statuses[200],
            refused=answers.statuses[503],
            refused_p50_ms=percentile(answers.refused_s, 50) * 1e3,
            refused_p99_ms=percentile(answers.refused_s, 99) * 1e3,
            gap_p50_ms=percentile(answers.gaps_s, 50) * 1e3,
            gap_p99_ms=percentile(answers.gaps_s, 99) * 1e3,
            late_ms=answers.late_s * 1e3,
        )
    rss = during.rss_bytes
    report.details["rss_bytes"] = rss
    report.details["cpu_s"] = dict(zip(("client", "server"), during.cpu_s, strict=True))
    say(f"CPU s while requests came: {report.details['cpu_s']}")
    report.claim("refusals that are no 503 with Retry-After", during.n_wrong, "<=", 0)
    n_lost = before.n_lost + during.n_lost + after.n_lost
    report.claim("streams that lost a token", n_lost, "<=", 0)
    report.claim("refused_p99_s", percentile(during.refused_s, 99), "<=", 0.05)
    report.claim("gap_p99_ratio", percentile(during.gaps_s, 99) / alone_s, "<=", 1.1)
    report.claim("rss_growth_mb", (max(rss) - rss[0]) / 1e6, "<=", 64)


def parser() -> ArgumentParser:
    """The options."""
    result = arguments(__doc__)
    result.add_argument("--requests", type=int, default=10_000)
    result.add_argument("--rate", type=int, default=1_000, help="requests a second")
    result.add_argument(
        "--streams", type=int, default=4, help="of the baseline, in turn"
    )
    result.add_argument(
        "--step-ms", type=float, default=0.0, help="a fake engine's step"
    )
    result.add_argument("--serve", type=int, metavar="PORT", help="be the server")
    return result


def main() -> int:
    """Run the script."""
    options = parse(parser())
    uvloop = {"use_uvloop": True}
    if options.serve:
        anyio.run(answer, options, backend_options=uvloop)
        return 0
    report = Report("overload", options)
    with server(options) as url:
        anyio.run(measure, options, report, url, url.pid, backend_options=uvloop)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
