"""Bodies that are too large, too slow, or none."""

import anyio
import pytest

from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.keys import VARIABLE
from tests.loops import anyio_backend  # noqa: F401
from tests.serve.support import LIMIT_S, chatting, serving
from tests.serve.wire import chat, wire

pytestmark = pytest.mark.anyio

MANY = 8 * 2**20


async def test_a_large_body_is_refused_by_its_head(anyio_backend_name):
    """
    8 MiB and one byte: nothing of it is read, and the connection is closed.
    """
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.begin(content_length=str(MANY + 1))
                    status, headers, told = await client.answer()
                    assert await client.rest() == b""

    assert (status, headers["connection"]) == (413, "close")
    assert told["error"]["code"] == "body_too_large"
    assert str(MANY) in told["error"]["message"]


async def test_a_refusal_reaches_who_still_sends(anyio_backend_name, monkeypatch):
    """
    A body of 5 MB is let go by, so that no reset of the connection overtakes the answer.
    """
    monkeypatch.setenv(VARIABLE, "sk-1")
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.post(b" " * (5 * 2**20), connection="close")
                    status, *_ = await client.answer()
                    assert await client.rest() == b""

    assert status == 401


async def test_a_body_of_unknown_length_is_counted(anyio_backend_name):
    """
    It is refused as soon as it has too much, long before its end.
    """
    config = ServeConfig(max_body_bytes=1000)
    part = b"100\r\n" + b" " * 256 + b"\r\n"
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            app = make_app({"a": engine}, config)
            async with serving(app, anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.begin(transfer_encoding="chunked")
                    for _ in range(4):
                        await client.send(part)
                    status, _, told = await client.answer()
                async with wire(url) as client:
                    await client.post(chat(max_tokens=2, stream=False))
                    other, *_ = await client.answer()

    assert (status, told["error"]["code"]) == (413, "body_too_large")
    assert other == 200


async def test_a_slow_body_is_not_waited_for(anyio_backend_name):
    """
    408, and meanwhile it takes no place from others.
    """
    config = ServeConfig(body_s=0.2)
    with anyio.fail_after(LIMIT_S):
        async with chatting(max_waiting=0) as engine:
            app = make_app({"a": engine}, config)
            async with serving(app, anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.begin(content_length="100")
                    await client.send(b"{")
                    status, headers, told = await client.answer()
            places = app.state.service.places

    assert (status, headers["connection"]) == (408, "close")
    assert told["error"]["code"] == "body_timeout"
    assert places.n_open == 0


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b"{", b"\xff\xff", b"null", b'"\xe4"', b"[" * 100_000, b"9" * 5000],
        b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
async def test_what_is_no_chat_is_refused(body, anyio_backend_name):
    """
    With 400, however it is broken; the connection goes on.
    """
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.post(body)
                    status, _, told = await client.answer()
                    await client.post(chat(max_tokens=2, stream=False))
                    other, *_ = await client.answer()

    assert (status, told["error"]["type"]) == (400, "invalid_request_error")
    assert other == 200
