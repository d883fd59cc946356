"""The life of an engine whose model reads prompts with an encoder, and what streams see of it."""

import anyio
import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.api.test_supervisor import break_executor
from tests.support.limits import LIMIT_S
from tests.support.loops import anyio_backend  # noqa: F401
from tests.support.near_ties import parting
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.anyio
HANG_S = LIMIT_S
# Sums in 32 bits: what is computed beside changes last digits only, and near ties with them.
CONTEXT = ContextConfig(
    n_ctx=2048, n_threads=1, type_k="f32", type_v="f32", flash_attn="off", n_ubatch=256
)
CONFIG = EngineConfig(
    context=CONTEXT, scheduler=SchedulerConfig(n_slots=3), max_restarts=3
)
GREEDY = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True, logprobs=2)
PROMPTS = ("a llama reads", "two llamas read a book", "nobody reads")


async def sleep_1(engine) -> None:
    await engine.sleep(1)
    await engine.wake()


async def sleep_2(engine) -> None:
    await engine.sleep(2)
    await engine.wake()


async def rebuild(engine) -> None:
    await engine.rebuild_session("as told")


async def warm_up_of_a_new_context(engine) -> None:
    await sleep_1(engine)
    await engine.warmup()


async def fail(engine) -> None:
    break_executor(engine, n_failures=1, after=0)


async def reload(engine) -> None:
    await engine.reload()


async def outputs_through(engine, change) -> list[tuple[int, ...]]:
    """The outputs of streams that have begun when *change* comes, and of one after it."""
    outputs: dict[int, tuple[int, ...]] = {}

    async def finish(index, generation) -> None:
        outputs[index] = (await generation.collect()).token_ids

    async with anyio.create_task_group() as group:
        generations = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
        for index, generation in enumerate(generations):
            await generation.__aenter__()
            await anext(generation)
            group.start_soon(finish, index, generation)
        await change(engine)
    last = await engine.complete(PROMPTS[0], GREEDY)
    return [*(outputs[index] for index in sorted(outputs)), last.token_ids]


@pytest.mark.native
@pytest.mark.parametrize(
    ("change", "n_failed"),
    [
        (sleep_1, 0),
        (sleep_2, 0),
        (rebuild, 0),
        (warm_up_of_a_new_context, 0),
        (AsyncEngine.warmup, 0),
        (fail, 1),
        (reload, 0),
    ],
)
async def test_streams_have_the_tokens_that_they_have_alone(change, n_failed):
    """
    What an encoder made of their prompts is made again where the context is another one.
    """
    with anyio.fail_after(HANG_S):
        async with AsyncEngine.open(tiny_model("t5"), CONFIG) as engine:
            alone = [await engine.complete(prompt, GREEDY) for prompt in PROMPTS]
            outputs = await outputs_through(engine, change)
            stats = engine.stats()

    pairs = zip([*alone, alone[0]], outputs, strict=True)
    assert [parting(one.logprobs, tokens) for one, tokens in pairs] == [None] * 4
    assert [len(tokens) for tokens in outputs] == [150] * 4
    assert len({one.token_ids for one in alone}) == len(PROMPTS)
    assert stats.no_space_steps == 0
    assert stats.failed_steps == n_failed


@pytest.mark.parametrize("change", [sleep_1, rebuild, AsyncEngine.warmup])
async def test_nothing_is_decoded_before_sources_are_read_again(change):
    """
    Such a decode would be a failed step; the fake refuses it.
    """
    executor = FakeExecutor(fake_limits(n_source=32))
    async with fake_engine(executor) as engine:
        params = SamplingParams(max_tokens=64)
        async with engine.generate("abc", params) as generation:
            await anext(generation)
            await change(engine)
            disturbed = await generation.collect()
        alone = await engine.complete("abc", params)

    assert disturbed.token_ids == alone.token_ids
