"""
Clients of eight kinds of a service, and what they met with.

All come at once. A client that is told 503 tries again, but for the flood.
"""

from __future__ import annotations

import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio.abc import SocketStream
from anyio.lowlevel import checkpoint

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
LONG_PROMPT = "word " * 400
MAX_TRIES = 10_000
BAD_BODIES: tuple[tuple[bytes, int, str | None], ...] = (  # body, status, place
    (b"{", 400, "body"),
    (b"[" * 100_000, 400, "body"),
    (b"[]", 400, "body"),
    (b"{}", 400, "messages"),
    (b'{"messages": []}', 400, "messages"),
    (b'{"messages": [{"role": "user"}], "temperature": -1}', 400, "temperature"),
    (b'{"messages": [{"role": "user"}], "max_tokns": 1}', 400, "max_tokns"),
    (b'{"messages": [{"role": "user"}], "deadline_s": "soon"}', 400, "deadline_s"),
    (b'{"messages": [{"role": "user"}], "stream": "yes"}', 400, "stream"),
    (b'{"messages": [{"role": "user"}], "self": 1}', 400, "self"),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        400,
        "messages[0].content[0]",
    ),
    (
        b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"a b " * 50_000),
        400,
        "messages",
    ),
)


@dataclass(slots=True)
class Outcome:
    """What one client met with."""

    kind: str
    status: int | None = None  # of the last try
    place: str | None = None  # the field that an error names
    n_refused: int = 0  # tries that were answered 503
    texts: list[str] = field(default_factory=list)  # of the events with text
    reason: str | None = None
    is_whole: bool = False  # the stream ended as it should
    wrong: list[str] = field(default_factory=list)  # promises that were not kept


class Exchange:
    """One request on a connection of its own."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._buffer = b""
        self.status = 0
        self.headers: dict[str, str] = {}

    async def send(self, body: bytes, method: str = "POST", path: str = PATH) -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        await self._stream.send(head.encode() + body)

    async def read_head(self) -> None:
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += await self._stream.receive()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        pairs = (line.split(": ", 1) for line in lines)
        self.headers = {name.lower(): value for name, value in pairs}

    async def events(self) -> AsyncGenerator[Any, None]:
        """The events as they come; the last is [DONE]."""
        while True:
            *events, self._buffer = self._buffer.split(b"\n\n")
            for event in events:  # beside them are the lengths of chunks
                data = event.partition(b"data: ")[2]
                yield data.decode() if data == b"[DONE]" else json.loads(data)
            try:
                self._buffer += await self._stream.receive()
            except anyio.EndOfStream:
                return

    async def answer(self) -> Any:
        """The JSON of an answer that is no stream."""
        try:
            while True:
                self._buffer += await self._stream.receive()
        except anyio.EndOfStream:
            return json.loads(self._buffer)


class Clients:
    """The clients of one service."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._others_left = anyio.Event()
        self.outcomes: list[Outcome] = []

    @property
    def all(self) -> list[tuple[str, Callable[[Outcome], Coroutine[Any, Any, None]]]]:
        """The kind of each client, and what it does."""
        ask = self.ask
        return [
            *[("short", partial(ask, max_tokens=4))] * 8,
            *[("long", partial(ask, max_tokens=64))] * 5,
            *[("leaves in prefill", self.leave_early)] * 8,
            *[("leaves midway", self.leave_midway)] * 7,
            *[("too late", partial(ask, max_tokens=64, deadline_s=1e-6))] * 5,
            *[("flood", partial(ask, max_tokens=8, max_tries=1))] * 10,
            *[("bad body", partial(self.send_bad, *bad)) for bad in BAD_BODIES],
            *[("slow", partial(ask, max_tokens=32, reads=self._others_left.wait))] * 4,
        ]

    async def run(self) -> None:
        """All of them, at once; the slow ones read when the others have gone."""
        async with anyio.create_task_group() as slow:
            async with anyio.create_task_group() as tasks:
                for kind, client in self.all:
                    self.outcomes.append(Outcome(kind))
                    group = slow if kind == "slow" else tasks
                    group.start_soon(client, self.outcomes[-1])
            self._others_left.set()

    @asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        async with await anyio.connect_tcp(HOST, self._port) as stream:
            yield Exchange(stream)

    async def ask(
        self,
        outcome: Outcome,
        *,
        max_tries: int = MAX_TRIES,
        reads: Callable[[], Awaitable[None]] = checkpoint,
        **fields: Any,
    ) -> None:
        """Ask until it is taken, and read to the end, once *reads* returns."""
        for _ in range(max_tries):
            async with self.exchange() as exchange:
                await exchange.send(chat(**fields))
                if await taken(exchange, outcome):
                    await reads()
                    await read(exchange, outcome)
                if outcome.status != 503:
                    return

    async def leave_early(self, _: Outcome) -> None:
        """Whether it was taken is not known."""
        async with self.exchange() as exchange:
            await exchange.send(chat(text=LONG_PROMPT, max_tokens=64))

    async def leave_midway(self, outcome: Outcome) -> None:
        for _ in range(MAX_TRIES):
            async with self.exchange() as exchange:
                await exchange.send(chat(max_tokens=512))
                if await taken(exchange, outcome):
                    async with aclosing(exchange.events()) as events:
                        await anext(events)
                    return
                if outcome.status != 503:
                    return

    async def send_bad(
        self, body: bytes, status: int, place: str | None, outcome: Outcome
    ) -> None:
        for _ in range(MAX_TRIES):  # whether there is room is asked before what is sent
            async with self.exchange() as exchange:
                await exchange.send(body)
                await taken(exchange, outcome)
            if outcome.status != 503:
                break
        if (outcome.status, outcome.place) != (status, place):
            outcome.wrong.append(f"{body[:60]!r} is answered {outcome.status}")

    async def wait_until_up(self) -> None:
        """Until the server answers."""
        while True:
            try:
                await self.health()
            except OSError:
                await checkpoint()
            else:
                return

    async def health(self) -> tuple[int, Any]:
        async with self.exchange() as exchange:
            await exchange.send(b"", "GET", "/health")
            await exchange.read_head()
            return exchange.status, await exchange.answer()


def chat(text: str = "Say something.", **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    always = {"messages": messages, "ignore_eos": True, "stream": True}
    return json.dumps(always | fields).encode()


async def taken(exchange: Exchange, outcome: Outcome) -> bool:
    """Whether a stream begins; otherwise the answer is one error and says what to do."""
    await exchange.read_head()
    outcome.status = exchange.status
    if exchange.status == 200:
        return True
    error = (await exchange.answer())["error"]
    outcome.place = error["param"]
    if exchange.status == 503:
        outcome.n_refused += 1
    if (exchange.status == 503) != ("retry-after" in exchange.headers):
        outcome.wrong.append(f"{exchange.status} with {exchange.headers}")
    if not (error["code"] and error["message"]):
        outcome.wrong.append(f"{error} says nothing")
    return False


async def read(exchange: Exchange, outcome: Outcome) -> None:
    async for event in exchange.events():
        if event == "[DONE]":
            outcome.is_whole = True
            continue
        if "error" in event:
            outcome.wrong.append(str(event["error"]))
            continue
        (choice,) = event["choices"]
        outcome.texts.append(choice["delta"].get("content", ""))
        outcome.reason = choice["finish_reason"] or outcome.reason
