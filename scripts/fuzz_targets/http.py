"""Bodies and heads of requests to a server, which has a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from scripts.fuzz_targets.target import JSON_WORDS, Target, Try


class _Server:
    """The application of a server on a loop of its own."""

    def __init__(self) -> None:
        import logging

        from pyllama_raw.serve import ServeConfig, make_app
        from tests.serve.support import chatting

        logging.disable()
        self.loop = asyncio.new_event_loop()
        engine = self.run(chatting().__aenter__())
        self.app = make_app({"m": engine}, ServeConfig(any_model=True, deadline_s=5))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @property
    def paths(self) -> list[str]:
        from scripts.fuzz_bodies import endpoints

        return sorted(endpoints(self.app))


def _bodies() -> Try:
    server = _Server()
    paths = server.paths

    async def status_of(path: str, body: bytes) -> int:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        unread, statuses, ended = [body], [], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not unread:
                await ended.wait()
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif not message.get("more_body", False):
                ended.set()

        await asyncio.wait_for(server.app(scope, receive, send), 60)
        assert len(statuses) == 1, "an answer without a head, or with two"
        return int(statuses[0])

    def attempt(data: bytes) -> None:
        path = paths[data[0] % len(paths)] if data else paths[0]
        status = server.run(status_of(path, data[1:]))
        assert status not in (500, 503), f"{path}: {status}"

    return attempt


def _body_seeds() -> list[bytes]:
    from pyllama_raw.serve import ServeConfig  # noqa: F401 - of the models below
    from scripts.fuzz_bodies import cases

    server = _Server()
    models = _models(server)
    paths = sorted(models)
    return [
        bytes([paths.index(case.path)]) + case.body
        for case in cases(models, 1, 150)
        if len(case.body) < 4096
    ]


def _models(server: _Server) -> dict[str, Any]:
    from scripts.fuzz_bodies import endpoints

    return endpoints(server.app)


class _Transport(asyncio.Transport):
    """A connection whose client has sent all that it will."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed = bytearray(), False

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def set_protocol(self, protocol: Any) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(
            name, default
        )


def _heads() -> Try:
    import uvicorn
    from uvicorn.server import ServerState

    from pyllama_raw.serve.connections import Connection, Connections
    from pyllama_raw.serve.run import OPTIONS

    server, errors = _Server(), []
    server.loop.set_exception_handler(lambda _, context: errors.append(context))
    connections = Connections(5.0, 5.0, 100)
    config = uvicorn.Config(server.app, http=Connection.of(connections), **OPTIONS)
    config.load()

    async def talk(data: bytes) -> bytes:
        state = ServerState()
        connection = config.http_protocol_class(
            config, state, {}, asyncio.get_running_loop()
        )  # type: ignore[operator,union-attr]
        transport = _Transport()
        connection.connection_made(transport)
        # In two parts, because heads come in any.
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            if part and not transport.closed:
                connection.data_received(part)
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        with_limit = (
            asyncio.wait(state.tasks, timeout=60) if state.tasks else asyncio.sleep(0)
        )
        await with_limit
        assert not state.tasks, "a request goes on without its client"
        return bytes(transport.sent)

    def attempt(data: bytes) -> None:
        errors.clear()
        sent = server.run(talk(data))
        assert not errors, str(errors[0])
        assert b"HTTP/1.1 500" not in sent, sent[:300]
        assert not connections.all, "a connection stays in its group"

    return attempt


def _head_seeds() -> list[bytes]:
    body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
    path, host = b"/v1/chat/completions", b"Host: a\r\n"
    kind = b"Content-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    chunks = b"%x;a=b\r\n%b\r\n0\r\nTrailer: a\r\n\r\n" % (len(body), body)
    post = b"POST %b HTTP/1.1\r\n%b%b" % (path, host, kind)
    return [
        b"GET /health HTTP/1.1\r\n" + host + b"\r\n",
        b"GET /v1/models?a=%ff&b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"HEAD /livez HTTP/1.1\r\n" + host + b"X-Request-Id: abc\r\n\r\n" * 2,
        b"OPTIONS * HTTP/1.1\r\n" + host + b"Origin: http://a\r\n\r\n",
        post + length + b"\r\n" + body,
        post + chunked + b"\r\n" + chunks,
        post + b"Expect: 100-continue\r\n" + length + b"\r\n" + body,
        post
        + b"Authorization: Bearer a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        + length
        + b"\r\n"
        + body,
        post + length + chunked + b"\r\n" + chunks,
        (b"GET /metrics HTTP/1.1\r\n" + host + b"\r\n") * 20,
    ]


HEAD_WORDS = (
    b"\r\n", b"\n", b"\r\n\r\n", b": ", b" HTTP/1.1\r\n", b"GET ", b"POST ", b"DELETE ", b"Content-Length: ",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"X-Request-Id: \xff\r\n", b"Content-Encoding: gzip\r\n",
    b"%", b"%00", b"/../", b"//", b"?", b"#", b"\x00", b"\xff", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"a" * 5000,
)  # fmt: skip

TARGETS = (
    Target("bodies", _bodies, _body_seeds, (), words=JSON_WORDS, n_head=1),
    Target("heads", _heads, _head_seeds, (), words=HEAD_WORDS, max_bytes=2**17),
)  # fmt: skip
