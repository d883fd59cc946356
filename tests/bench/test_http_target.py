"""Both protocols, spoken by a server that answers with what a test gives it."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer as Server

from pyllama_raw.bench.call import Call, attempt
from pyllama_raw.bench.http_target import first_model, http_target

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
]

USAGE = {"prompt_tokens": 9, "completion_tokens": 3}


def sse(*events):
    return (
        "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]"
    )


@asynccontextmanager
async def serving(body, status=200, seen=None, packed=False):
    """A server that says the same to all; its bodies are cut anywhere."""

    async def answer(request):
        if seen is not None:
            seen.append((request.path, await request.read()))
        response = web.StreamResponse(status=status)
        if packed:
            response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        raw = body.encode()
        for start in range(0, len(raw), 7):
            await response.write(raw[start : start + 7])
        return response

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with Server(application) as server:
        yield str(server.make_url("")).rstrip("/")


async def ask(call, *server, protocol="openai", forbidden=(), **options):
    """The record of *call*."""
    async with (
        serving(*server, **options) as url,
        http_target(url, protocol, forbidden) as target,
    ):
        return await attempt(target, call)


def chunk(text, **more):
    return {"choices": [{"index": 0, "text": text, **more}]}


async def test_openai_counts_what_the_usage_says():
    """
    A chunk may hold two tokens; the last one may hold none. Usage brings the counts.
    """
    seen = []
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    last = chunk("", finish_reason="length") | {"usage": USAGE | details}
    body = sse(chunk("a"), chunk("b c"), last | {"queue_s": 0.5})
    record = await ask(Call([1, 2], 3), body, seen=seen, forbidden=[2])

    assert record.error is None
    assert (record.text, len(record.times), record.n_output) == ("ab c", 2, 3)
    assert (record.n_prompt, record.n_cached, record.queue_s) == (9, 4, 0.5)
    path, asked = seen[-1]
    asked = json.loads(asked)
    assert path == "/v1/completions"
    assert asked["prompt"] == [1, 2]
    assert (asked["max_tokens"], asked["ignore_eos"]) == (3, True)
    assert asked["logit_bias"] == {"2": -100}


async def test_openai_without_usage_counts_chunks():
    """
    As of servers that know no stream_options; cached tokens stay unknown.
    """
    body = sse(chunk("a"), chunk(""), chunk("", finish_reason="length"))
    record = await ask(Call("x", 2), body)

    assert (record.error, record.n_output, record.n_cached) == (None, 2, None)


async def test_llama_server_names_its_tokens():
    """
    Ids are kept, so that turns can be ids; timings bring the counts.
    """
    timings = {"cache_n": 2, "prompt_n": 3}
    body = sse(
        {"tokens": [5], "content": "a", "stop": False},
        {"tokens": [6, 7], "content": "bc", "stop": False},
        {"tokens": [], "content": "", "stop": True, "timings": timings},
    )
    record = await ask(Call("x", 3), body, protocol="llama-server")

    assert (record.error, record.tokens, record.text) == (None, [5, 6, 7], "abc")
    assert (record.n_cached, record.n_prompt) == (2, 5)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("busy", 503, "status 503: busy"),
        (sse({"error": {"message": "no"}}), 200, "no"),
        ("error: gone\n", 200, "error: gone"),
        (sse(chunk("a")), 200, "1 tokens came, not 2"),
    ],
)
async def test_refusals_and_short_answers_are_failures(body, status, message):
    """
    An answer of another length than was asked for did other work.
    """
    record = await ask(Call("x", 2), body, status)

    assert record.error is not None
    assert message in record.error


async def test_a_compressed_stream_is_read():
    """
    Proxies do that, since the client allows it.
    """
    record = await ask(Call("x", 1), sse(chunk("a")), packed=True)

    assert (record.error, record.text) == (None, "a")


async def test_a_lost_connection_is_a_failure():
    """
    It does not end the run.
    """
    async with serving("") as url:
        pass
    async with http_target(url) as target:
        record = await attempt(target, Call("x", 2))

    assert record.error is not None
    assert record.error.startswith("CallFailed: ClientConnectorError")


@pytest.mark.parametrize(
    ("body", "status", "name"),
    [
        ('{"data": [{"id": "m"}, {"id": "n"}]}', 200, "m"),
        ('{"data": []}', 200, "default"),
        ("[]", 200, "default"),
        ("not here", 404, "default"),
        ("no json", 200, "default"),
    ],
)
async def test_the_first_model_of_a_server_is_asked_for(body, status, name):
    """
    Some servers refuse names they do not know; others list none.
    """
    seen = []
    async with serving(body, status, seen) as url, aiohttp.ClientSession() as client:
        assert await first_model(client, url) == name
    assert seen == [("/v1/models", b"")]


async def test_each_call_has_a_connection_of_its_own():
    """
    However many run at once, and though the server would keep them.
    """
    n_calls, n_connections, n_asked = 150, 0, 0
    all_asked = anyio.Event()
    event = {"tokens": [1], "content": "a", "stop": True}
    body = sse(event | {"timings": {"cache_n": 0, "prompt_n": 2}}).encode()

    async def answer(reader, writer):
        nonlocal n_connections, n_asked
        n_connections += 1
        while line := await reader.readline():  # until the client leaves
            if line.lower().startswith(b"content-length: "):
                size = int(line.split()[1])
            if line != b"\r\n":
                continue
            await reader.readexactly(size)
            n_asked += 1
            if n_asked == n_calls:
                all_asked.set()
            await all_asked.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
            writer.write(body)
        writer.close()

    async def call():
        record = await attempt(target, Call([1, 2], 1))
        assert record.error is None

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with http_target(f"http://{host}:{port}") as target:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for _ in range(n_calls):
                    group.start_soon(call)
            await call()
    server.close()

    assert n_connections == n_asked == n_calls + 1
