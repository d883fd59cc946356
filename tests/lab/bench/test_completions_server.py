"""The adapter of the benchmarks, spoken to by the target that measures it."""

from contextlib import asynccontextmanager

import anyio
import pytest
import uvicorn

from benchmarks.completions_server import App
from benchmarks.peers import free_port
from pyllama_raw import ContextConfig, EngineConfig
from pyllama_raw.lab.bench.call import Call
from pyllama_raw.lab.bench.drive import Run, closed_loop
from pyllama_raw.lab.bench.http_target import http_target
from tests.tiny import tiny_model


@asynccontextmanager
async def serving():
    """Its address and itself, once it listens."""
    served = App(tiny_model("llama"), EngineConfig(context=ContextConfig(n_ctx=4096)))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(served, port=port, log_level="warning"))
    async with anyio.create_task_group() as group:
        group.start_soon(server.serve)
        with anyio.fail_after(30):
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await anyio.sleep(0.01)
        yield f"http://127.0.0.1:{port}", served
        server.should_exit = True


async def measure(calls: list[Call]) -> Run:
    async with serving() as (url, _), http_target(url, "openai") as target:
        return await closed_loop(target, calls, 1)


@pytest.mark.native
def test_streams_have_all_that_is_measured():
    """
    Exact lengths, prompt and cached tokens, queue time; a refusal is an error.
    """
    prompt = [5, 6, 7, 8, 9, 10]

    run = anyio.run(measure, [Call(prompt, 4), Call(prompt, 4), Call([1] * 5000, 1)])

    first, second, refused = run.records
    assert [record.error for record in (first, second)] == [None, None]
    assert [record.n_output for record in (first, second)] == [4, 4]
    assert [record.n_prompt for record in (first, second)] == [6, 6]
    assert [record.n_cached for record in (first, second)] == [0, 4]
    assert first.queue_s is not None
    assert refused.error is not None
    assert "5000" in refused.error


async def leave() -> int:
    """How many tokens are computed for a client that leaves after two of 4,000."""
    async with serving() as (url, served), http_target(url, "openai") as target:
        await closed_loop(target, [Call([5, 6, 7], 4000, leave_after=2)], 1)
        with anyio.fail_after(30):
            while served.engine.stats().running:  # noqa: ASYNC110 - no event tells
                await anyio.sleep(0.001)
        return served.engine.stats().computed_tokens


@pytest.mark.native
def test_who_leaves_is_not_computed_for():
    """
    The server hears of it by the connection.
    """
    assert anyio.run(leave) < 4000
