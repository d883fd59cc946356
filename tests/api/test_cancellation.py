"""All the ways to leave a request, on both event loops; each frees its slot."""

import anyio
import pytest

from pyllama_raw import FinishReason, SamplingParams
from pyllama_raw.errors import DeadlineExceeded
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.engine.support import HANG_S, HeldSteps
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=100)


async def settled(engine):
    """Statistics once the engine has done what was asked before."""
    scheduler = engine._thread.driver.scheduler
    quiet = engine._thread.call(lambda: None)
    await anyio.to_thread.run_sync(quiet.result, HANG_S)
    done = engine._thread.call(scheduler.stats)
    return await anyio.to_thread.run_sync(done.result, HANG_S)


async def test_leaving_the_block_cancels():
    """
    Breaking out of the loop frees the slot and keeps what was read.
    """
    async with fake_engine() as engine:
        async with engine.generate("a", LONG) as generation:
            async for delta in generation:
                seen = delta.text
                break
        stats = await settled(engine)
        result = generation.result

    assert stats.running == 0
    assert result.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert result.text.startswith(seen)


async def test_leaving_while_a_step_runs_aborts_it():
    """
    The flag that libllama polls is set before the block is left.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    async with fake_engine(executor) as engine:
        async with engine.generate("a", LONG) as generation:
            await anyio.to_thread.run_sync(held.wait_for_one)
        aborting = executor.flag.is_set
        held.allow(100)
        stats = await settled(engine)

    assert aborting
    assert generation.result.finish_reason is FinishReason.CANCELLED
    assert generation.result.text == ""
    assert stats.aborted_steps == 1
    assert stats.finished["cancelled"] == 1


async def test_leaving_while_waiting_for_a_slot():
    """
    A queued request leaves the queue; nothing was computed for it.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=held)
    async with fake_engine(executor) as engine:
        async with engine.generate("a", LONG) as running:
            await anyio.to_thread.run_sync(held.wait_for_one)
            async with engine.generate("b", LONG) as waiting:
                pass
            held.allow(1000)
            await running.collect()
        stats = await settled(engine)

    assert waiting.result.finish_reason is FinishReason.CANCELLED
    assert stats.finished == {
        "stop": 0,
        "length": 1,
        "cancelled": 1,
        "deadline": 0,
        "closed": 0,
    }


async def test_cancelling_a_scope_ends_the_request():
    """
    A cancelled reader leaves at once; the engine needs no answer from it.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    async with fake_engine(executor) as engine:
        with anyio.CancelScope() as scope:
            async with engine.generate("a", LONG) as generation:
                await anyio.to_thread.run_sync(held.wait_for_one)
                scope.cancel()
                await anext(generation)
        held.allow(100)
        stats = await settled(engine)

    assert scope.cancelled_caught
    assert stats.finished["cancelled"] == 1


async def test_cancel_lets_the_reader_finish():
    """
    cancel() inside the block: the stream ends by itself, with the engine's account.
    """
    async with fake_engine() as engine:
        async with engine.generate("a", LONG) as generation:
            await anext(generation)
            generation.cancel()
            generation.cancel()
            _ = [delta async for delta in generation]
        result = generation.result

    assert result.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert result.timings.ttft_s is not None
    assert len(result.token_ids) == len(result.text)


async def test_cancel_before_the_start():
    """
    A generation that was cancelled first never reaches the engine.
    """
    async with fake_engine() as engine:
        generation = engine.generate("a", LONG)
        generation.cancel()

        assert [delta async for delta in generation] == []
        assert generation.result.finish_reason is FinishReason.CANCELLED
        assert (await settled(engine)).submitted == 0


async def test_dropping_a_generation_cancels_it_and_warns():
    """
    Forgotten without a block: the request ends, and a ResourceWarning tells.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    async with fake_engine(executor) as engine:
        generation = engine.generate("a", LONG)
        await generation._start()
        await anyio.to_thread.run_sync(held.wait_for_one)
        dropped = [generation]
        del generation
        with pytest.warns(ResourceWarning, match="dropped"):
            dropped.clear()
        held.allow(100)
        stats = await settled(engine)

    assert stats.finished["cancelled"] == 1


async def test_a_read_generation_is_dropped_in_silence():
    """
    One that was read to its end needs no block.
    """
    async with fake_engine() as engine:
        generation = engine.generate("a", SamplingParams(max_tokens=3))
        text = "".join([delta.text async for delta in generation])
        del generation

    assert len(text) == 3


async def test_a_deadline_keeps_what_was_generated():
    """
    The result says deadline; it is no error.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    async with fake_engine(executor) as engine:
        shift = [0.0]
        clock = engine._thread.clock
        engine._thread.driver.clock = lambda: clock() + shift[0]
        async with engine.generate("a", LONG, deadline_s=60.0) as generation:
            held.allow(2)
            for _ in range(3):
                await anyio.to_thread.run_sync(held.wait_for_one)
            shift[0] = 60.0
            held.allow(100)
            result = await generation.collect()

    assert result.finish_reason is FinishReason.DEADLINE
    assert result.usage.completion_tokens == 3


async def test_a_score_is_whole_or_an_error():
    """
    A deadline in the middle is an error that tells how far it came.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=2, n_outputs=2), on_step=held)
    async with fake_engine(executor) as engine:
        shift = [0.0]
        clock = engine._thread.clock
        engine._thread.driver.clock = lambda: clock() + shift[0]

        async def end() -> None:
            held.allow(1)
            for _ in range(2):
                await anyio.to_thread.run_sync(held.wait_for_one)
            shift[0] = 60.0
            held.allow(100)

        async with anyio.create_task_group() as group:
            group.start_soon(end)
            with pytest.raises(DeadlineExceeded) as caught:
                await engine.score("a" * 9, deadline_s=60.0)

    assert 0 < caught.value.n_done < caught.value.n_wanted == 9


@pytest.mark.parametrize("n_steps", range(8))
async def test_leaving_at_any_step_frees_everything(n_steps):
    """
    Whatever the engine has done by then: no slot, cell or sampler stays in use.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_batch=8), on_step=held)
    async with fake_engine(executor) as engine:
        async with engine.generate("a" * 40, LONG), engine.generate("b", LONG) as other:
            held.allow(n_steps)
            for _ in range(n_steps + 1):
                await anyio.to_thread.run_sync(held.wait_for_one)
            other.cancel()
        held.allow(1000)
        stats = await settled(engine)

        assert (stats.running, stats.waiting, stats.n_cells_used) == (0, 0, 0)
        assert stats.finished["cancelled"] == 2
        assert executor.opened == set()
