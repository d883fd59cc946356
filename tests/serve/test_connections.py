"""Heads, connections and what stands beside bodies: bounded in bytes, in time and in number."""

import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import httpx
import pytest

from pyllama_raw.serve import ListenConfig, ServeConfig, make_app, serve
from pyllama_raw.serve.connections import MAX_HEAD, backlog_of, usable
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.serve.support import LIMIT_S, chatting
from tests.serve.wire import chat, wire

pytestmark = pytest.mark.anyio
GET = b"GET /livez HTTP/1.1\r\nhost: here\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the server of the command is uvicorn


@asynccontextmanager
async def listening(service=None, executor=None, **options):
    """The address of the server that the command runs."""
    address, is_up = [], anyio.Event()

    def say(line):
        address.append(line.split()[-1])
        is_up.set()

    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine, anyio.create_task_group() as group:
            app = make_app({"a": engine}, service or ServeConfig())
            group.start_soon(partial(serve, app, ListenConfig(port=0, **options), say))
            await is_up.wait()
            yield address[0]
            group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "parts",
    [
        [GET + b"a: ", *[b"x" * 2**14] * 8],
        [GET, *[b"".join(b"a%d: b\r\n" % n for n in range(2000))] * 8],
        [b"GET /", *[b"y" * 2**14] * 8],
        [GET + b"a: " + b"x" * MAX_HEAD + b"\r\n\r\n"],
        [CHUNKED + b"2", *[b";" + b"z" * 2**14] * 8],
        [CHUNKED + b"0\r\n", *[b"a: " + b"z" * 2**14 + b"\r\n"] * 8],
        [b"\r\n" * 2**14] * 4 + [GET],
    ],
)
async def test_what_is_no_body_has_64_kib(parts):
    """
    Headers, one or many, addresses, extensions of chunks, trailers, lines before a request:
    431, and others are answered.
    """
    async with listening() as url:
        async with wire(url) as client, wire(url) as other:
            for part in parts:
                await client.send(part)
            status, headers, told = await client.answer()
            await other.send(GET + b"\r\n")
            live, *_ = await other.answer()

    assert (status, headers["connection"]) == (431, "close")
    assert told["error"]["code"] == "head_too_large"
    assert str(MAX_HEAD) in told["error"]["message"]
    assert live == 200


async def test_a_head_of_a_few_kib_is_none_too_large():
    """
    Long keys and cookies are let in, also if they come in pieces.
    """
    async with listening() as url:
        async with wire(url) as client:
            for part in (GET, b"a: " + b"x" * 50_000, b"\r\n", b"\r\n"):
                await client.send(part)
            status, *_ = await client.answer()

    assert status == 200


@pytest.mark.parametrize("start", [b"", b"GET /livez HT", GET, GET + b"\r\n" + GET])
async def test_a_slow_head_is_not_waited_for(start):
    """
    The connection is closed, whatever has come; also for a second request.
    """
    async with listening(head_s=0.2) as url:
        async with wire(url) as client:
            if start:
                await client.send(start)
            text = await client.rest()

    assert text.count(b"200 OK") == (start.count(b"GET") == 2)


async def test_an_idle_connection_stays_open():
    """
    head_s is not for clients that owe nothing.
    """
    async with listening(head_s=0.2) as url:
        async with wire(url) as client:
            statuses = []
            for _ in range(2):
                await client.send(GET + b"\r\n")
                statuses.append((await client.answer())[0])
                await anyio.sleep(1.5)

    assert statuses == [200, 200]


async def test_an_idle_connection_is_closed_in_the_end():
    """
    After keep_alive_s.
    """
    async with listening(keep_alive_s=0.2) as url:
        async with wire(url) as client:
            await client.send(GET + b"\r\n")
            status, *_ = await client.answer()
            rest = await client.rest()

    assert (status, rest) == (200, b"")


@pytest.mark.parametrize(
    "part",
    [
        b"P",
        b"POST /completion HT",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: 9\r\n\r\n",
    ],
)
async def test_silent_clients_make_room_for_others(part):
    """
    Twice as many as there may be connections: each that comes after them is answered.
    """
    async with listening(max_connections=8) as url:
        async with AsyncExitStack() as stack:
            for _ in range(16):
                client = await stack.enter_async_context(wire(url))
                await client.send(part)
            statuses = []
            for _ in range(4):
                async with wire(url) as client:
                    await client.send(GET + b"\r\n")
                    statuses.append((await client.answer())[0])

    assert statuses == [200] * 4


async def test_requests_behind_each_other_are_answered_in_turn():
    """
    A hundred in one packet, with bodies and without.
    """
    body = chat(max_tokens=1, stream=False)
    post = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
    post += b"content-length: %d\r\n\r\n" % len(body) + body
    async with listening() as url:
        async with wire(url) as client:
            await client.send((GET + b"\r\n" + post) * 50)
            answers = [await client.answer() for _ in range(100)]

    assert [status for status, *_ in answers] == [200] * 100
    assert [told.get("object", "") for *_, told in answers] == [
        "",
        "chat.completion",
    ] * 50


async def test_a_client_that_leaves_ends_all_of_its_requests():
    """
    Also the one in work, where others wait behind it.
    """
    body = chat(max_tokens=10_000, stream=False)
    limits = {"n_slots": 2, "n_ctx_slot": 2**14, "n_batch": 8, "n_cells": 2**15}
    executor = FakeExecutor(
        fake_limits(**limits),
        next_token=lambda _: ord("a"),
        on_step=lambda *_: time.sleep(0.01),
    )
    async with listening(executor=executor) as url:
        async with wire(url) as client:
            for _ in range(3):
                await client.post(body)
            await until_running(url, 1)
        await until_running(url, 0)
        async with wire(url) as client:
            await client.send(GET.replace(b"livez", b"metrics") + b"\r\n")
            metrics = await client.until(b"http_requests_in_flight 1.0")

    assert b'status="499"' in metrics


async def until_running(url, n):
    """Until *n* slots have a request."""
    n_running = None
    while n_running != n:
        async with wire(url) as client:
            await client.send(GET.replace(b"livez", b"slots") + b"\r\n")
            slots = (await client.answer())[2]
        n_running = sum(slot["is_processing"] for slot in slots)


async def test_an_upgrade_is_answered_as_any_request():
    """
    And the connection ends with it.
    """
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    async with listening() as url:
        async with wire(url) as client:
            await client.send(GET + upgrade + b"\x00" * 100)
            status, headers, _ = await client.answer()
            rest = await client.rest()

    assert (status, headers["connection"], rest) == (200, "close", b"")


async def test_a_wish_for_a_tunnel_with_a_body_is_refused(caplog):
    """
    And no line of the log is an error: nobody needs a key to send it.
    """
    request = b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc"
    async with listening() as url:
        async with wire(url) as client:
            await client.send(request)
            status, headers, _ = await client.answer()

    assert (status, headers["connection"]) == (400, "close")
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


@pytest.mark.parametrize("n_at_once", [1, 50, 2**16])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_behind_a_wish_for_http_2_is_read(n_at_once, is_chunked):
    """
    Java's client has the wish by default; the connection stays as it is.
    """
    upgrade = (
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    )
    body = chat(max_tokens=2, stream=False)
    frame = b"content-length: %d\r\n\r\n%b" % (len(body), body)
    if is_chunked:
        frame = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
        frame %= (len(body), body)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
    request = head + b"content-type: application/json\r\n" + upgrade + frame
    async with listening() as url:
        async with wire(url) as client:
            answers = []
            for _ in range(2):
                for at in range(0, len(request), n_at_once):
                    await client.send(request[at : at + n_at_once])
                answers.append(await client.answer())

    assert [status for status, *_ in answers] == [200, 200]
    assert all("connection" not in headers for _, headers, _ in answers)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks(stream):
    """
    It does not know them: an answer of no known length ends with its connection.
    """
    body = chat(max_tokens=2, stream=stream)
    head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
    async with listening() as url:
        async with wire(url) as client:
            await client.send(
                b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
            )
            status, headers = await client.head()
            answer = await client.rest()

    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    begin, end = (b"data: {", b"data: [DONE]\n\n") if stream else (b"{", b"}")
    assert answer.startswith(begin)
    assert answer.endswith(end)


async def test_no_http_is_refused():
    """
    With an error as any other.
    """
    async with listening() as url:
        async with wire(url) as client:
            await client.send(b"\x16\x03\x01 hello\r\n\r\n")
            status, _, told = await client.answer()

    assert (status, told["error"]["type"]) == (400, "invalid_request_error")


async def test_an_answer_that_nobody_reads_is_ended():
    """
    After send_s, whole answers, too; the request had its place until then.
    """
    text = "a" * 2**22
    body = b'{"messages": [{"role": "user", "content": "%b"}]}' % text.encode()
    async with listening(ServeConfig(send_s=0.5)) as url:
        async with wire(url) as client:
            await client.post(body, "/apply-template")
            await client.head()
            with pytest.raises(anyio.BrokenResourceError):  # noqa: PT012
                while True:  # the server reads no more of it, once it has closed
                    await client.send(GET + b"\r\n")
                    await anyio.sleep(0.05)


@pytest.mark.parametrize(
    ("descriptors", "n_used", "n_connections"),
    [(128, 28, 75), (1024, 24, 750), (32, 30, 1), (2**16, 36, 49125)],
)
def test_connections_leave_descriptors_for_others(descriptors, n_used, n_connections):
    """
    Files, processes of templates, and those that are accepted before they are counted.
    """
    most = usable(descriptors, n_used)

    assert most == n_connections
    assert 1 <= backlog_of(descriptors, most) <= 2048


@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": uses}) for uses in (False, True)]
)
async def test_a_server_after_one_that_was_cancelled_answers():
    """
    Its socket has the number of the first one, of which the event loop knows nothing any more.
    """
    answers = []
    for _ in range(3):
        async with listening() as url:
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                answers.append((await client.get("/livez")).status_code)

    assert answers == [200] * 3
