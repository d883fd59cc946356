"""Both clients of servers: what comes is told as lines, or as what went wrong."""

from contextlib import asynccontextmanager

import anyio
import pytest

from benchmarks.peers import raw_client
from pyllama_raw.lab import targets
from pyllama_raw.lab.targets import HttpFailed, open_client
from tests.lab.bench.raw_server import chunked, serving, sized
from tests.support.limits import LIMIT_S


@asynccontextmanager
async def raw(url, headers):
    """The client of the scripts, as open_client() gives that of the command."""
    yield raw_client.RawClient(url, headers)


pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.parametrize("connect", [open_client, raw], ids=["httpx", "raw"]),
]

BODY = "data: one\n\ndata: zw\u00f6lf\u2028\x85\nlast"
LINES = [b"data: one", b"", "data: zw\u00f6lf\u2028\x85".encode(), b"last"]


async def post(connect, url, on_line):
    async with connect(url, {}) as client:
        await client.post("/x", {}, on_line)


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize(
    "answer",
    [
        sized(BODY),
        chunked(BODY),
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY.encode(),
    ],
    ids=["sized", "chunked", "until it closes"],
)
async def test_lines_come_whole(connect, answer, piece):
    """
    Wherever networks and servers cut; the last one needs no end. Only a newline ends a line:
    JSON may hold other characters that end one in Python.
    """
    lines = []
    async with serving(answer, piece) as server:
        await post(connect, server.url, lines.append)

    assert lines == LINES


async def test_lines_come_when_they_are_there(connect):
    """
    Not when the answer ends: this one never does.
    """
    event = anyio.Event()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"

    async def ask():
        with pytest.raises((ConnectionError, HttpFailed)):
            await post(connect, server.url, lambda _: event.set())

    with anyio.fail_after(LIMIT_S):
        async with serving(head + b"first\n") as server:
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await event.wait()


async def test_what_is_sent(connect):
    """
    JSON, the headers given, below the path of the server.
    """
    async with serving(sized("")) as server:
        key = {"Authorization": "Bearer key"}
        async with connect(server.url + "/api/", key) as client:
            await client.post("/v1/x", {"prompt": "zwölf"}, pytest.fail)
            await client.get("/v1/models", pytest.fail)

    post, get = server.requests
    assert (post.path, post.body) == ("/api/v1/x", {"prompt": "zwölf"})
    assert post.headers["content-type"] == "application/json"
    assert post.headers["host"] == server.url.removeprefix("http://")
    assert (get.path, get.body) == ("/api/v1/models", None)
    assert {a.headers["authorization"] for a in server.requests} == {"bearer key"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (sized("busy\n", 503), "status 503: busy"),
        (sized("", 307), "status 307: "),
        (b"HTTP/1.1 404 x\r\n\r\nnot here", "status 404: not here"),
        (b"not HTTP at all\r\n\r\n", "no HTTP|ProtocolError illegal"),
        (sized("a\nb")[:-1], "before the end|without sending complete"),
        (b"HTTP/1.1 200", "before the end|without sending"),
    ],
)
async def test_what_is_no_answer_is_an_error(connect, answer, message):
    """
    With the status, or why there is none.
    """
    async with serving(answer) as server:
        with pytest.raises((ConnectionError, HttpFailed), match=message):
            await post(connect, server.url, str)


async def test_nobody_listens(connect):
    """
    The error says so.
    """
    async with serving(b"") as server:
        pass

    with pytest.raises((OSError, HttpFailed), match=r"refused|Connect"):
        await post(connect, server.url, pytest.fail)


async def test_silence_has_an_end(connect, monkeypatch):
    """
    Counted from the last byte.
    """
    for module in (targets, raw_client):
        monkeypatch.setattr(module, "TIMEOUT_S", 0.05)

    async with serving(b"") as server:
        with pytest.raises((TimeoutError, HttpFailed), match=r"nothing|Timeout"):
            await post(connect, server.url, str)


async def test_who_leaves_closes_the_connection(connect):
    """
    A server learns of it by that.
    """
    async with serving(b"") as server:
        async with anyio.create_task_group() as group:
            group.start_soon(post, connect, server.url, pytest.fail)
            while not server.requests:  # noqa: ASYNC110 - set by a callback
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        with anyio.fail_after(LIMIT_S):
            while not server.n_left:  # noqa: ASYNC110 - set by a callback
                await anyio.sleep(0.01)


@pytest.mark.parametrize("answer", [sized("a\nb\n"), b"HTTP/1.1 200 OK\r\n\r\na"])
async def test_an_error_of_the_listener_is_raised(connect, answer):
    """
    As it is, also if the connection has closed by then.
    """

    def hear(_):
        raise KeyError("tokens")

    async with serving(answer) as server:
        with pytest.raises(KeyError, match="tokens"):
            await post(connect, server.url, hear)


async def test_each_request_has_a_connection_of_its_own(connect):
    """
    However many run at once.
    """
    async with serving(sized("a\n")) as server, connect(server.url, {}) as client:
        async with anyio.create_task_group() as group:
            for _ in range(150):
                group.start_soon(client.post, "/x", {}, str)

    assert len(server.requests) == 150
