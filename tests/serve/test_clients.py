"""Clients of all kinds, which come, wait and leave at once."""

from contextlib import asynccontextmanager

import anyio
import pytest

from pyllama_raw import AsyncEngine, EngineConfig, SchedulerConfig
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.testing import FakeExecutor, fake_limits
from scripts.service_clients import Clients, Outcome, chat, read, taken
from tests.engine.support import HeldSteps
from tests.serve.support import LIMIT_S, chatting, serving
from tests.support.loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.anyio

CONFIG = EngineConfig(scheduler=SchedulerConfig(n_slots=4, max_waiting=8))


@asynccontextmanager
async def clients_of(engine, backend):
    """The clients of a service that ends with the block."""
    async with serving(
        make_app({"a": engine}, ServeConfig(max_body_bytes=2**22)), backend
    ) as url:
        yield Clients(int(url.rsplit(":", 1)[1]))


def by_kind(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.kind, []).append(outcome)
    return found


@pytest.mark.native
async def test_many_clients_leave_every_slot_free(anyio_backend_name):
    """
    Whatever clients do, refusals come before the first byte and say what to do, streams
    are whole, requests add up, and in the end none is left.
    """
    with anyio.fail_after(LIMIT_S):
        async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
            async with clients_of(engine, anyio_backend_name) as clients:
                await clients.run()
            while engine.stats().running:  # who left last is cancelled by the next step
                await anyio.lowlevel.checkpoint()
            stats = engine.stats()
    kinds = by_kind(clients.outcomes)
    whole = kinds["short"] + kinds["long"] + kinds["slow"]

    assert len(clients.outcomes) == 59
    assert [o for o in clients.outcomes if o.wrong] == []
    assert {(o.status, o.reason, o.is_whole) for o in whole} == {(200, "length", True)}
    assert {o.status for o in kinds["leaves midway"]} == {200}
    assert {o.status for o in kinds["too late"]} == {504}
    assert {(o.status, o.is_whole) for o in kinds["flood"]} <= {
        (200, True),
        (503, False),
    }
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
    assert stats.submitted == sum(stats.finished.values()) + stats.failed
    n_answered = sum(o.status in (200, 504) for o in clients.outcomes)
    assert 0 <= stats.submitted - n_answered <= len(kinds["leaves in prefill"])


@asynccontextmanager
async def held(backend, **options):
    """The clients of a service whose engine has one slot and does no step by itself."""
    steps = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=steps)
    engine = chatting(executor, **options)
    async with clients_of(engine, backend) as clients:
        try:
            yield engine, steps, clients
        finally:
            steps.allow(1000)
            await engine.aclose()


async def test_a_full_queue_is_told_before_the_first_byte(anyio_backend_name):
    """
    Who finds no slot and no place in the queue gets 503 with Retry-After; the client that
    has the slot never hears of it.
    """
    first, second = Outcome("first"), Outcome("second")
    with anyio.fail_after(LIMIT_S):
        async with held(anyio_backend_name, max_waiting=0) as (_, steps, clients):
            async with clients.exchange() as one, clients.exchange() as other:
                await one.send(chat(max_tokens=3))
                await anyio.to_thread.run_sync(steps.wait_for_one)
                await other.send(chat(max_tokens=3))
                is_taken = await taken(other, second)
                steps.allow(3)
                assert await taken(one, first)
                await read(one, first)

    assert (is_taken, second.status, second.n_refused) == (False, 503, 1)
    assert (first.is_whole, first.reason) == (True, "length")
    assert first.wrong + second.wrong == []


async def test_a_client_that_leaves_the_queue_is_forgotten(anyio_backend_name):
    """
    A request that waits for a slot ends with its client, before anything was answered.
    """
    with anyio.fail_after(LIMIT_S):
        async with held(anyio_backend_name) as (engine, steps, clients):
            async with clients.exchange() as one:
                await one.send(chat(max_tokens=3))
                await anyio.to_thread.run_sync(steps.wait_for_one)
                async with clients.exchange() as other:
                    await other.send(chat(max_tokens=3))
                    while not engine._parts.admission.n_tokens:  # of prompts that wait
                        await anyio.lowlevel.checkpoint()
                for _ in range(3):  # a round trip is enough to hear of the end
                    await clients.health()
                steps.allow(1000)
                assert await taken(one, Outcome("one"))
                await read(one, Outcome("one"))
            while engine.stats().finished["cancelled"] < 1:
                await anyio.lowlevel.checkpoint()
            stats = engine.stats()

    assert (stats.finished["length"], stats.finished["cancelled"]) == (1, 1)


async def until_left(engine):
    """Return once the engine has cancelled a request."""
    while engine.stats().finished["cancelled"] < 1:
        await anyio.lowlevel.checkpoint()


async def test_a_client_that_leaves_before_a_whole_answer_ends_its_request(
    anyio_backend_name,
):
    """
    Nothing was written yet, and nobody waits for the rest.
    """
    with anyio.fail_after(LIMIT_S):
        async with held(anyio_backend_name) as (engine, steps, clients):
            async with clients.exchange() as one:
                await one.send(chat(max_tokens=100, stream=False))
                await anyio.to_thread.run_sync(steps.wait_for_one)
            for _ in range(3):  # a round trip is enough to hear of the end
                await clients.health()
            steps.allow(1000)
            await until_left(engine)
            stats = engine.stats()

    assert stats.finished["length"] == 0


async def test_a_service_that_drains_ends_its_streams_and_takes_no_more(
    anyio_backend_name,
):
    """
    While aclose(drain_s) waits, a stream goes on to its end, health and chats are 503.
    """
    first, late = Outcome("first"), Outcome("late")
    with anyio.fail_after(LIMIT_S):
        async with held(anyio_backend_name) as (engine, steps, clients):
            assert (await clients.health())[0] == 200
            async with clients.exchange() as one, clients.exchange() as other:
                await one.send(chat(max_tokens=3))
                await anyio.to_thread.run_sync(steps.wait_for_one)
                async with anyio.create_task_group() as group:
                    group.start_soon(engine.aclose, LIMIT_S)
                    while engine.alive:
                        await anyio.lowlevel.checkpoint()
                    health = await clients.health()
                    await other.send(chat(max_tokens=3))
                    await taken(other, late)
                    steps.allow(1000)
                    assert await taken(one, first)
                    await read(one, first)

    assert health == (503, {"status": "draining"})
    assert (late.status, late.wrong) == (503, [])
    assert (first.reason, first.is_whole, first.wrong) == ("length", True, [])
