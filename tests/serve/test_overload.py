"""More requests than there is room for."""

import anyio
import pytest

from pyllama_raw.serve import make_app
from pyllama_raw.serve.body import ServedBody
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.service import Service
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.engine.support import HeldSteps
from tests.serve.support import LIMIT_S, chatting, serving
from tests.serve.wire import chat, wire
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


def held(steps, **options):
    """An engine with one slot and no place to wait, whose steps a test allows."""
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=steps)
    return chatting(executor, **({"max_waiting": 0} | options))


async def ask(url, **fields):
    """Status, headers and the answer."""
    async with wire(url) as client:
        await client.post(chat(stream=False, **fields))
        return await client.answer()


async def test_there_is_no_room_before_the_body_is_read(anyio_backend_name):
    """
    Nothing but the head is needed to refuse; the stream that runs loses nothing, and when
    it has ended there is room.
    """
    steps = HeldSteps()
    with anyio.fail_after(LIMIT_S):
        async with held(steps) as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as first, wire(url) as other:
                    await first.post(chat(max_tokens=3))
                    await anyio.to_thread.run_sync(steps.wait_for_one)
                    await other.begin(content_length="1000")
                    status, headers, told = await other.answer()
                    steps.allow(1000)
                    text = await first.until(b"[DONE]")
                later, *_ = await ask(url, max_tokens=3)

    assert (status, told["error"]["code"]) == (503, "server_is_overloaded")
    assert told["error"]["type"] == "service_unavailable_error"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert b'"finish_reason":"length"' in text
    assert later == 200


async def test_a_full_model_does_not_stand_in_the_way_of_another(anyio_backend_name):
    """
    The engine of each counts requests, and refuses those that find no place in its queue.
    """
    steps = HeldSteps()
    with anyio.fail_after(LIMIT_S):
        async with held(steps) as full, chatting() as free:
            app = make_app({"full": full, "free": free})
            async with serving(app, anyio_backend_name) as url:
                async with wire(url) as first:
                    await first.post(chat(max_tokens=3, model="full"))
                    await anyio.to_thread.run_sync(steps.wait_for_one)
                    refused = await ask(url, max_tokens=3, model="full")
                    answered = await ask(url, max_tokens=3, model="free")
                    steps.allow(1000)
                    await first.until(b"[DONE]")

    assert (refused[0], refused[2]["error"]["code"]) == (503, "server_is_overloaded")
    assert "retry-after" in refused[1]
    assert answered[0] == 200


async def test_a_client_says_how_long_it_waits_for_a_slot(anyio_backend_name):
    """
    Another server may be tried then: the status is 503, and says when to come again.
    """
    steps = HeldSteps()
    with anyio.fail_after(LIMIT_S):
        async with held(steps, max_waiting=1) as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as first, wire(url) as other:
                    await first.post(chat(max_tokens=3))
                    await anyio.to_thread.run_sync(steps.wait_for_one)
                    await other.post(chat(stream=True, max_tokens=3, max_wait_s=1e-6))
                    while len(engine._thread.records) < 2:
                        await anyio.lowlevel.checkpoint()
                    steps.allow(1000)
                    status, headers, told = await other.answer()
                    text = await first.until(b"[DONE]")

    assert (status, told["error"]["code"]) == (503, "waited_too_long")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert b'"finish_reason":"length"' in text


async def test_a_service_has_limits_of_time_for_those_who_name_none():
    """
    What a request says wins.
    """
    service = Service({}, ServeConfig(deadline_s=9.0, max_wait_s=2.0))

    options = ServedBody(max_wait_s=5.0).served(service)

    assert options == {"deadline_s": 9.0, "max_wait_s": 5.0}
    assert ServedBody().served(Service({}, ServeConfig())) == {}
