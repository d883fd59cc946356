"""Requests that once ended a real engine: it refuses them and lives on."""

import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.errors import InvalidRequest
from tests.support.hostile import Unhashable
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]

NAN = float("nan")
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=2048, n_threads=1), scheduler=SchedulerConfig(n_slots=4)
)
KILLERS = [
    {"priority": NAN},
    {"priority": 1j},
    {"cache_salt": ["salt"]},
    {"cache_salt": Unhashable(salt=1)},
    {"deadline_s": 1e300},
    {"cache_points": [NAN]},
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("options", KILLERS, ids=range(len(KILLERS)))
async def test_streams_outlive_a_request_that_is_refused(options):
    """
    Four running streams get all their tokens, and a later request is served.
    """
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [[n, n + 1, n + 2] for n in range(10, 14)]
    async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
        streams = [engine.generate(prompt, params) for prompt in prompts]
        for stream in streams:
            await anext(stream)
        for _ in range(10):  # as many as make a queue that has to be sorted
            with pytest.raises(InvalidRequest):
                await engine.complete([5], params, **options)
        results = [await stream.collect() for stream in streams]
        later = await engine.complete([5, 6], params)

    assert [len(result.token_ids) for result in results] == [40] * 4
    assert len(later.token_ids) == 40
