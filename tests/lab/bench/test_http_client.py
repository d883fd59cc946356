"""The client of the benchmarks: what comes is told as lines, or as what went wrong."""

import anyio
import pytest

from pyllama_raw.lab.bench import http_client
from pyllama_raw.lab.bench.http_client import HttpClient, HttpFailed
from tests.lab.bench.raw_server import chunked, serving, sized

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
]

BODY = "data: one\n\ndata: zwölf\nlast"
LINES = [b"data: one", b"", "data: zwölf".encode(), b"last"]


async def lines_of(answer, piece=7):
    """What post() tells of *answer*."""
    lines = []
    async with serving(answer, piece) as server:
        await HttpClient(server.url, {}).post("/x", {}, lines.append)
    return lines


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
async def test_lines_come_whole(answer, piece):
    """
    Wherever networks and servers cut; the last one needs no end.
    """
    assert await lines_of(answer, piece) == LINES


async def test_lines_come_when_they_are_there():
    """
    Not when the answer ends: this one never does.
    """
    told = anyio.Event()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"

    async def ask():
        with pytest.raises(ConnectionError):
            await HttpClient(server.url, {}).post("/x", {}, lambda _: told.set())

    with anyio.fail_after(30):
        async with serving(head + b"first\n") as server:
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await told.wait()


async def test_what_is_sent():
    """
    JSON, the headers given, below the path of the server.
    """
    async with serving(sized("")) as server:
        client = HttpClient(server.url + "/api/", {"Authorization": "Bearer key"})
        await client.post("/v1/x", {"prompt": "zwölf"}, pytest.fail)
        await client.get("/v1/models", pytest.fail)

    post, get = server.asked
    assert (post.path, post.body) == ("/api/v1/x", {"prompt": "zwölf"})
    assert post.headers["content-type"] == "application/json"
    assert post.headers["host"] == server.url.removeprefix("http://")
    assert (get.path, get.body) == ("/api/v1/models", None)
    assert {a.headers["authorization"] for a in server.asked} == {"bearer key"}


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (sized("busy\n", 503), HttpFailed, "status 503: busy"),
        (sized("", 307), HttpFailed, "status 307: "),
        (b"HTTP/1.1 404 x\r\n\r\nnot here", HttpFailed, "status 404: not here"),
        (b"not HTTP at all", HttpFailed, "no HTTP"),
        (sized("a\nb")[:-1], ConnectionError, "before the end"),
        (b"HTTP/1.1 200", ConnectionError, "before the end"),
    ],
)
async def test_what_is_no_answer_is_an_error(answer, kind, message):
    """
    With the status, or why there is none.
    """
    async with serving(answer) as server:
        with pytest.raises(kind, match=message):
            await HttpClient(server.url, {}).post("/x", {}, str)


async def test_nobody_listens():
    """
    The system's own error.
    """
    async with serving(b"") as server:
        pass

    with pytest.raises(OSError, match=r"refused|Connect"):
        await HttpClient(server.url, {}).post("/x", {}, pytest.fail)


async def test_silence_has_an_end(monkeypatch):
    """
    Counted from the last byte.
    """
    monkeypatch.setattr(http_client, "TIMEOUT_S", 0.05)

    async with serving(b"") as server:
        with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s"):
            await HttpClient(server.url, {}).post("/x", {}, str)


async def test_who_leaves_closes_the_connection():
    """
    A server learns of it by that.
    """
    async with serving(b"") as server:
        with anyio.move_on_after(0.05):
            await HttpClient(server.url, {}).post("/x", {}, pytest.fail)
        with anyio.fail_after(30):
            while not server.n_left:  # noqa: ASYNC110 - set by a callback
                await anyio.sleep(0.01)


@pytest.mark.parametrize("answer", [sized("a\nb\n"), b"HTTP/1.1 200 OK\r\n\r\na"])
async def test_an_error_of_the_listener_is_raised(answer):
    """
    As it is, also if the connection has closed by then.
    """

    def hear(_):
        raise KeyError("tokens")

    async with serving(answer) as server:
        with pytest.raises(KeyError, match="tokens"):
            await HttpClient(server.url, {}).post("/x", {}, hear)


async def test_each_request_has_a_connection_of_its_own():
    """
    However many run at once.
    """
    async with serving(sized("a\n")) as server:
        client = HttpClient(server.url, {})
        async with anyio.create_task_group() as group:
            for _ in range(150):
                group.start_soon(client.post, "/x", {}, str)

    assert len(server.asked) == 150
