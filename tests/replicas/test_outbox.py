"""An application called without a server."""

import asyncio

import pytest

from pyllama_raw.replicas.relay import Outbox
from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def part(text: bytes) -> dict:
    return {"type": "http.response.body", "body": text, "more_body": True}


async def test_messages_come_in_order_and_those_at_once_together():
    """
    The application reads the body that was given; parts that go together are one.
    """

    async def app(scope, receive, send):
        await send(part((await receive())["body"]))
        await send(part(b"1"))
        await asyncio.sleep(0)
        await send(part(b"2"))

    batches = [batch async for batch in Outbox(b"0", 0.02).run(app, {})]

    assert batches == [[part(b"01")], [part(b"2")]]


async def test_errors_of_the_application_come_out():
    """
    After what it had sent.
    """
    batches = []

    async def app(scope, receive, send):
        await send(part(b"1"))
        raise ValueError("no")

    async def read():
        async for batch in Outbox(b"", 0).run(app, {}):
            batches.extend(batch)

    with pytest.raises(ValueError, match="no"):
        await read()

    assert batches == [part(b"1")]


async def test_a_client_that_leaves_cancels_the_application():
    """
    Closing the generator is leaving.
    """
    ended = asyncio.Event()

    async def app(scope, receive, send):
        await send(part(b"1"))
        try:
            await receive()
            await receive()
        finally:
            ended.set()

    batches = Outbox(b"", 0).run(app, {})
    await anext(batches)
    await batches.aclose()

    await asyncio.wait_for(ended.wait(), LIMIT_S)
