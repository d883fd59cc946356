"""Clients that leave, and engines that hang."""

import gc
import time

import anyio
import httpx
import pytest

from pyllama_raw import Generation
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.service import Exchange
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.engine.support import HeldSteps
from tests.serve.support import LIMIT_S, chatting, serving
from tests.serve.wire import PATH, chat, wire
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio

JSON = b"application/json"
LONG = "a prompt of many steps " * 4
STEP_S = 1e-3  # that a decode takes, so that nobody is done before it has left
LIMITS = {"n_slots": 2, "n_ctx_slot": 1024, "n_batch": 8, "n_cells": 2048}


def n_cancelled(engine):
    return engine.stats().finished["cancelled"]


async def until(holds):
    while not holds():  # noqa: ASYNC110 - nothing tells of it
        await anyio.sleep(1e-4)  # the engine's thread needs the GIL


async def leave_in_prefill(url, engine):
    """Leave while the prompt is computed, 8 tokens a step."""
    async with wire(url) as client:
        await client.post(chat(LONG, max_tokens=900))
        await until(lambda: engine.stats().running)


async def leave_a_stream(url, engine):
    """Leave after the first text."""
    async with wire(url) as client:
        await client.post(chat(max_tokens=900))
        await client.until(b'"content":"a')


async def leave_before_an_answer(url, engine):
    """Leave while the answer, which is to come at once, is computed."""
    async with wire(url) as client:
        await client.post(chat(max_tokens=900, stream=False))
        await until(lambda: engine.stats().running)


async def leave_within_a_body(url, engine):
    """Leave before the service knows what is asked."""
    async with wire(url) as client:
        await client.begin(content_length="1000")
        await client.send(b'{"messages"')


LEAVES = (leave_in_prefill, leave_a_stream, leave_before_an_answer)


@pytest.mark.parametrize(
    "n",
    [
        2,
        *(
            pytest.param(40, marks=pytest.mark.nightly, id=f"many-{i}")
            for i in range(8)
        ),
    ],
)
async def test_nothing_is_left_of_clients_that_leave(n, anyio_backend_name):
    """
    Their requests are cancelled, their slots and places are free, and no object of theirs
    lives on.
    """
    executor = FakeExecutor(
        fake_limits(**LIMITS),
        next_token=lambda _: ord("a"),
        on_step=lambda *_: time.sleep(STEP_S),
    )
    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine:
            app = make_app({"a": engine})
            async with serving(app, anyio_backend_name) as url:
                service = app.state.service
                for number in range(n * len(LEAVES)):
                    await LEAVES[number % len(LEAVES)](url, engine)
                    await until(lambda n=number: n_cancelled(engine) > n)
                    await leave_within_a_body(url, engine)
                    await until(lambda: not service.traffic.in_flight)
                stats = engine.stats()
            gc.collect()
            kinds = (Generation, Exchange)
            alive = [each for each in gc.get_objects() if isinstance(each, kinds)]

    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.finished["cancelled"] == stats.submitted == n * len(LEAVES)
    assert service.n_open == 0
    assert executor.opened == set()
    assert alive == []


@pytest.mark.parametrize("n_before", [1, 14])  # LONG takes 12 steps
@pytest.mark.parametrize("stream", [True, False])
async def test_a_slot_is_free_after_the_step_in_which_a_client_left(
    stream, n_before, anyio_backend_name
):
    """
    In prefill and later, whole or streamed: of a step that runs, no other one follows.
    """
    steps = HeldSteps()
    executor = FakeExecutor(fake_limits(**LIMITS), on_step=steps)

    def n_works():
        return sum(bool(plan.works) for plan in executor.plans)

    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine:
            app = make_app({"a": engine})
            async with serving(app, anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.post(chat(LONG, max_tokens=900, stream=stream))
                    for _ in range(n_before):
                        await anyio.to_thread.run_sync(steps.wait_for_one)
                        steps.allow()
                    await anyio.to_thread.run_sync(steps.wait_for_one)
                await until(lambda: app.state.service.traffic.in_flight == 0)
                n_begun = n_works()
                steps.allow(100)
                await until(lambda: n_cancelled(engine) == 1)

    assert n_begun == n_works() == n_before + 1


async def test_a_client_that_never_reads_is_taken_for_gone():
    """
    Its request is cancelled, and its place is free.
    """
    body = chat(max_tokens=900)
    config = ServeConfig(ping_s=0.01, send_s=0.01)
    executor = FakeExecutor(
        fake_limits(**LIMITS), on_step=lambda *_: time.sleep(STEP_S)
    )

    async def receive():
        if not unread:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": unread.pop()}

    async def send(message):
        if message["type"] == "http.response.body":
            await anyio.sleep_forever()

    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine:
            app = make_app({"a": engine}, config)
            unread = [body]
            await app(scope_of(len(body)), receive, send)
            await until(lambda: n_cancelled(engine) == 1)

    assert app.state.service.n_open == 0


def scope_of(n_bytes):
    length = str(n_bytes).encode()
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": PATH,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-length", length), (b"content-type", JSON)],
    }


async def test_an_error_after_the_answer_began_is_an_event(anyio_backend_name):
    """
    What was written stays, and the connection ends as it should.
    """
    rows = frozenset((step, request) for step in range(5, 99) for request in range(4))
    executor = FakeExecutor(fake_limits(**LIMITS), failing_rows=rows)
    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.post(chat(max_tokens=90), connection="close")
                    status, _ = await client.head()
                    text = await client.rest()

    assert status == 200
    assert b'"content":"' in text
    assert text.count(b'data: {"error"') == 1
    assert text.endswith(b"0\r\n\r\n")


async def test_a_frozen_engine_is_told_by_livez_alone(anyio_backend_name):
    """
    What does not need the engine goes on to answer.
    """
    steps = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=steps)
    config = ServeConfig(stall_s=0.05)
    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine:
            async with serving(
                make_app({"a": engine}, config), anyio_backend_name
            ) as url:
                async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as asking:
                    alive = (await asking.get("/livez")).status_code
                    async with wire(url) as client:
                        await client.post(chat(max_tokens=2))
                        await anyio.to_thread.run_sync(steps.wait_for_one)
                        while (frozen := await asking.get("/livez")).status_code == 200:
                            pass
                        others = {
                            path: (await asking.get(path)).status_code
                            for path in ("/readyz", "/metrics", "/v1/models", "/props")
                        }
                        steps.allow(100)
                        await client.until(b"[DONE]")
                    again = (await asking.get("/livez")).status_code

    assert (alive, frozen.status_code, again) == (200, 503, 200)
    assert frozen.json()["models"] == {"a": "stalled"}
    assert set(others.values()) == {200}
