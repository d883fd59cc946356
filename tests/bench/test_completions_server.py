"""The adapter of the benchmarks, spoken to by the target that measures it."""

import anyio
import httpx
import pytest

from benchmarks.completions_server import app
from pyllama_raw import ContextConfig, EngineConfig
from pyllama_raw.bench.call import Call
from pyllama_raw.bench.drive import Run, closed_loop
from pyllama_raw.bench.http_target import OpenAITarget
from tests.tiny import tiny_model


async def measure(calls: list[Call]) -> Run:
    served = app(tiny_model("llama"), EngineConfig(context=ContextConfig(n_ctx=256)))
    transport = httpx.ASGITransport(served)
    async with (
        served.router.lifespan_context(served),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        return await closed_loop(OpenAITarget(client), calls, 1)


@pytest.mark.native
def test_streams_have_all_that_is_measured():
    """
    Exact lengths, prompt and cached tokens, queue time; a refusal is an error.
    """
    prompt = [5, 6, 7, 8, 9, 10]

    run = anyio.run(measure, [Call(prompt, 4), Call(prompt, 4), Call([1] * 300, 1)])

    first, second, refused = run.records
    assert [record.error for record in (first, second)] == [None, None]
    assert [record.n_output for record in (first, second)] == [4, 4]
    assert [record.n_prompt for record in (first, second)] == [6, 6]
    assert [record.n_cached for record in (first, second)] == [0, 5]
    assert first.queue_s is not None
    assert refused.error is not None
    assert "300" in refused.error
