"""examples/service.py behind real servers, with real clients."""

import json
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
import uvicorn
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from examples import handler
from examples.service import make_app, serve
from pyllama_raw import AsyncEngine, EngineConfig, SchedulerConfig
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from scripts.service_clients import Clients, Outcome, chat, read, taken
from tests.engine.support import HeldSteps
from tests.loops import anyio_backend  # noqa: F401
from tests.tiny import tiny_model

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30
CONFIG = EngineConfig(scheduler=SchedulerConfig(n_slots=4, max_waiting=8))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serving(app, backend, server="hypercorn"):
    """The clients of a server that ends with the block."""
    port, ended = free_port(), anyio.Event()
    clients = Clients(port)
    async with anyio.create_task_group() as group:
        if server == "uvicorn":
            options = uvicorn.Config(
                app, port=port, log_level="warning", lifespan="off"
            )
            running = uvicorn.Server(options)
            group.start_soon(running.serve)
        else:

            async def run() -> None:
                bind = f"127.0.0.1:{port}"
                await serve(app, bind, ended.wait, on_trio=backend == "trio")

            group.start_soon(run)
        await clients.wait_until_up()
        yield clients
        if server == "uvicorn":
            running.should_exit = True
        ended.set()


def by_kind(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.kind, []).append(outcome)
    return found


@pytest.mark.native
@pytest.mark.parametrize("server", ["hypercorn", "uvicorn"])
async def test_sixty_clients_leave_every_slot_free(anyio_backend_name, server):
    """
    Whatever clients do, refusals come before the first byte and say what to do, streams
    are whole, requests add up, and in the end none is left.
    """
    if (server, anyio_backend_name) == ("uvicorn", "trio"):
        pytest.skip("uvicorn knows asyncio only")
    with anyio.fail_after(LIMIT_S):
        async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
            async with serving(make_app(engine), anyio_backend_name, server) as clients:
                await clients.run()
            stats = engine.stats()
    kinds = by_kind(clients.outcomes)
    whole = kinds["short"] + kinds["long"] + kinds["slow"]

    assert len(clients.outcomes) == 60
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
    engine = fake_engine(executor, chat_template=TEMPLATE, **options)
    async with serving(make_app(engine), backend) as clients:
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


async def test_a_plain_handler_ends_its_request_with_its_client(anyio_backend_name):
    """
    examples/handler.py, whose server cancels nothing; whoever stays gets the whole answer.
    """
    steps = HeldSteps()
    engine = fake_engine(FakeExecutor(fake_limits(), on_step=steps))
    app = Starlette(routes=[*handler.app.routes, Route("/health", answer_nothing)])
    app.state.engine = engine
    body = json.dumps({"prompt": "hello"}).encode()
    with anyio.fail_after(LIMIT_S):
        async with engine, serving(app, anyio_backend_name) as clients:
            async with clients.exchange() as one:
                await one.send(body, path="/ask")
                await anyio.to_thread.run_sync(steps.wait_for_one)
            for _ in range(3):
                await clients.health()
            steps.allow(1000)
            await until_left(engine)
            async with clients.exchange() as other:
                await other.send(body, path="/ask")
                await other.read_head()
                answer = await other.answer()
            stats = engine.stats()

    assert (stats.finished["cancelled"], stats.finished["length"]) == (1, 1)
    assert list(answer) == ["text"]


async def answer_nothing(_):
    return JSONResponse({})


@pytest.mark.native
async def test_openais_client_reads_whole_answers_and_streams(anyio_backend_name):
    """
    A plain create() is a completion with a message and the tokens used; with stream=True
    the chunks hold the same text.
    """
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say something."}],
        "temperature": 0,
        "max_tokens": 8,
    }

    def talk(port: int) -> tuple[ChatCompletion, ChatCompletion, list[Any]]:
        base = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=base, api_key="none") as client:
            create = client.chat.completions.create
            with pytest.raises(openai.BadRequestError, match="temperature"):
                create(**ask | {"temperature": -1})
            two = create(**ask, n=2, extra_body={"ignore_eos": True})
            return create(**ask), two, list(create(**ask, stream=True))

    with anyio.fail_after(LIMIT_S):
        async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
            async with serving(make_app(engine), anyio_backend_name) as clients:
                found = await anyio.to_thread.run_sync(talk, clients._port)
    plain, two, chunks = found

    (choice,) = plain.choices
    assert isinstance(plain, ChatCompletion)
    assert (plain.object, plain.model, choice.index) == ("chat.completion", "tiny", 0)
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert plain.usage.total_tokens == (
        plain.usage.prompt_tokens + plain.usage.completion_tokens
    )
    assert [choice.finish_reason for choice in two.choices] == ["length", "length"]
    assert two.usage.completion_tokens == 16
    assert {(type(c), c.id, c.object) for c in chunks} == {
        (ChatCompletionChunk, chunks[0].id, "chat.completion.chunk")
    }
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == choice.message.content


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

    assert (health[0], health[1]["alive"]) == (503, False)
    assert (late.status, late.wrong) == (503, [])
    assert (first.reason, first.is_whole, first.wrong) == ("length", True, [])


@pytest.mark.native
def test_a_signal_ends_the_process_when_its_stream_has_ended(anyio_backend_name):
    """
    After SIGTERM a running stream comes to its end, then the process ends with 0.
    """
    port = free_port()
    command = [sys.executable, ROOT / "examples" / "service.py", "--port", str(port)]
    command += ["--model", tiny_model("llama")]
    command += ["--trio"] if anyio_backend_name == "trio" else []
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    assert process.stderr is not None
    outcome = Outcome("long")

    async def talk() -> None:
        clients = Clients(port)
        with anyio.fail_after(LIMIT_S):
            async with clients.exchange() as exchange:
                await exchange.send(chat(max_tokens=200))
                assert await taken(exchange, outcome)
                process.send_signal(signal.SIGTERM)
                await read(exchange, outcome)

    try:
        assert b"Running on" in process.stderr.readline()
        anyio.run(talk)
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.communicate()

    assert (outcome.reason, outcome.is_whole, code) == ("length", True, 0)
