"""Who is taken on, as callers see it: at once, and never too late."""

import threading

import anyio
import pytest

from pyllama_raw import AsyncEngine, FinishReason, QueueFull, SamplingParams
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits, fake_parts
from tests.engine.support import HANG_S, HeldSteps

pytestmark = pytest.mark.anyio

PARAMS = SamplingParams(max_tokens=2)


@pytest.mark.parametrize("max_waiting", [0, 1])
async def test_an_idle_engine_takes_a_request_for_each_slot(max_waiting):
    """
    Whatever may wait: as many streams as there are slots are open at once.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=8, n_cells=1024), on_step=held)
    async with fake_engine(executor, max_waiting=max_waiting) as engine:
        n_open = 8 + max_waiting
        generations = [engine.generate("a", PARAMS) for _ in range(n_open)]
        for generation in generations:
            await generation.__aenter__()
        with pytest.raises(QueueFull):
            await engine.complete("b", PARAMS)
        held.allow(100)
        results = [await generation.collect() for generation in generations]
        again = await engine.complete("b", PARAMS)

    assert [r.finish_reason for r in results] == [FinishReason.LENGTH] * n_open
    assert again.finish_reason is FinishReason.LENGTH


async def test_entering_waits_for_no_step():
    """
    While a long step runs a caller is accepted, or refused, without an answer from it.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=held)
    async with fake_engine(executor, max_waiting=1) as engine:
        with anyio.fail_after(HANG_S):
            async with engine.generate("a", PARAMS) as running:
                await anyio.to_thread.run_sync(held.wait_for_one)
                async with engine.generate("b", PARAMS) as waiting:
                    with pytest.raises(QueueFull):
                        await engine.complete("c", PARAMS)
                held.allow(100)
                await running.collect()

    assert waiting.result.finish_reason is FinishReason.CANCELLED


async def test_leaving_while_entering_ends_the_request():
    """
    A caller whose scope is cancelled is not entered, and takes no place.
    """
    async with fake_engine(max_waiting=0) as engine:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with engine.generate("a", PARAMS):
                pytest.fail("entered")
        stats = engine.stats()

    assert scope.cancelled_caught
    assert stats.submitted == 0


async def test_leaving_does_not_wait_for_a_long_prompt():
    """
    A caller who leaves while the prompt is tokenised in a thread is gone at once.
    """
    entered, go_on = threading.Event(), threading.Event()
    parts = fake_parts()
    tokenize = parts.vocab.tokenize

    def slow(text, **options):
        entered.set()
        assert go_on.wait(HANG_S)
        return tokenize(text, **options)

    parts.vocab.tokenize = slow
    async with AsyncEngine(parts) as engine:
        with anyio.fail_after(HANG_S / 2), anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(engine.complete, "a" * 5000)
                assert await anyio.to_thread.run_sync(entered.wait, HANG_S)
                scope.cancel()
        go_on.set()

    assert scope.cancelled_caught
    assert engine.stats().submitted == 0


@pytest.mark.parametrize(
    "limits",
    [
        {"max_waiting": 0},
        {"max_waiting": 3},
        {"max_waiting_tokens": 0},
        {"max_waiting_tokens": 25},
    ],
)
async def test_many_prompts_never_fail_on_their_own_number(limits):
    """
    complete_many() holds back what the queue cannot take, in requests and in tokens.
    """
    prompts = ["a" * (1 + i % 20) for i in range(50)]
    async with fake_engine(**limits) as engine:
        with anyio.fail_after(HANG_S):
            results = await engine.complete_many(prompts, PARAMS)

    n_prompts = [result.usage.prompt_tokens for result in results]
    assert n_prompts == [len(prompt) + 1 for prompt in prompts]
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}


async def test_many_prompts_are_refused_if_others_fill_the_engine():
    """
    Where none of its own runs there is nothing to wait for: the queue is full.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=held)
    async with fake_engine(executor, max_waiting=0) as engine:
        with anyio.fail_after(HANG_S):
            async with engine.generate("a", PARAMS) as running:
                await anyio.to_thread.run_sync(held.wait_for_one)
                with pytest.raises(QueueFull):
                    await engine.complete_many(["b"] * 5, PARAMS)
                held.allow(100)
                result = await running.collect()

    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("n", [1, 4, 5, 9])
async def test_outputs_beyond_the_slots_wait(n):
    """
    complete_n() queues what the slots do not take, up to what the engine holds at all.
    """
    async with fake_engine(max_waiting=5) as engine:
        with anyio.fail_after(HANG_S):
            params = SamplingParams(max_tokens=2, n=n)
            results = await engine.complete_n("hello", params)

    assert [result.index for result in results] == list(range(n))
