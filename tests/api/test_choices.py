"""Several outputs of one prompt (n > 1), with a fake executor below a real scheduler."""

import anyio
import pytest

from pyllama_raw import CacheConfig, FinishReason, SamplingParams
from pyllama_raw.api.preparation import MAX_SEED
from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.step import DecodeStatus
from pyllama_raw.engine.build import make_cache
from pyllama_raw.errors import DecodeFailed, InvalidRequest, SamplingFailed
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.api.test_generate import expected
from tests.engine.support import HeldSteps
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio

PROMPT = "the same prompt for all of them"
N_PROMPT = len(PROMPT) + 1


def cache() -> PrefixCache:
    made = make_cache(CacheConfig(mode="live"), SnapshotKind.RANGE)
    assert made is not None
    return made


async def test_outputs_come_by_index_with_seeds_that_follow():
    """
    Each output is what its own request would give; its seed is the first one's plus
    its index, past the largest seed from 0.
    """
    async with fake_engine() as engine:
        params = SamplingParams(max_tokens=5, n=3, seed=MAX_SEED - 1)
        results = await engine.complete_n("hello", params)

    assert [r.index for r in results] == [0, 1, 2]
    assert [r.seed for r in results] == [MAX_SEED - 1, MAX_SEED, 0]
    assert {r.text for r in results} == {expected("hello", 5)}


async def test_deltas_carry_their_index():
    """
    The deltas of each index add up to the result of that index.
    """
    async with fake_engine() as engine:
        params = SamplingParams(max_tokens=8, n=4)
        texts = ["", "", "", ""]
        async with engine.generate("hello", params) as generation:
            async for delta in generation:
                texts[delta.index] += delta.text

    assert texts == [result.text for result in generation.results]
    assert generation.result == generation.results[0]
    assert generation.errors == {}


@pytest.mark.parametrize("n_slots", [8, 3])
async def test_a_prompt_is_computed_once(n_slots):
    """
    n outputs cost one prefill, also if not all fit the slots. Each other output computes
    the last two tokens of the prompt again.
    """
    executor = FakeExecutor(fake_limits(n_slots=n_slots, n_cells=1024))
    async with fake_engine(executor, cache=cache()) as engine:
        await engine.complete_n(PROMPT, SamplingParams(max_tokens=4, n=8))
        computed = engine.stats().computed_tokens

    assert computed <= N_PROMPT + 7 * 2 + 8 * 3


async def test_without_a_cache_outputs_are_the_same():
    """
    With the cache off each output computes the prompt; the texts do not change.
    """
    params = SamplingParams(max_tokens=6, n=3)
    async with fake_engine() as engine:
        plain = await engine.complete_n(PROMPT, params)
        computed = engine.stats().computed_tokens
    async with fake_engine(cache=cache()) as engine:
        shared = await engine.complete_n(PROMPT, params)

    assert [r.text for r in plain] == [r.text for r in shared]
    assert computed >= 3 * N_PROMPT


async def test_all_are_queued_or_none():
    """
    More outputs than slots and queue hold together are refused, for they never fit;
    nothing is left running, and as many as fit are served.
    """
    async with fake_engine(max_waiting=3) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.complete_n("hello", SamplingParams(max_tokens=2, n=8))
        stats = engine.stats()
        results = await engine.complete_n("hello", SamplingParams(max_tokens=2, n=7))

    assert (stats.submitted, stats.running, stats.waiting) == (0, 0, 0)
    assert (refused.value.name, refused.value.value) == ("n", 8)
    assert "at most 7 outputs" in str(refused.value)
    assert len(results) == 7


async def test_leaving_ends_all():
    """
    Leaving the block ends every output, running and waiting; results keep what came.
    """
    steps = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=2), on_step=steps)
    async with fake_engine(executor) as engine:
        steps.allow()
        params = SamplingParams(max_tokens=100, n=4)
        async with engine.generate("hello", params) as generation:
            async for _ in generation:
                break
        results = generation.results
        steps.allow(100)
        await engine.cache_stats()  # a command after the cancels: they are done
        stats = engine.stats()

    assert [r.finish_reason for r in results] == [FinishReason.CANCELLED] * 4
    assert (stats.running, stats.waiting) == (0, 0)


async def test_one_failure_does_not_lose_the_others():
    """
    An output whose sampler fails is in `errors`; the others are in `results`.
    """
    executor = FakeExecutor(fake_limits(), failing_rows=frozenset({(2, 2)}))
    async with fake_engine(executor) as engine:
        params = SamplingParams(max_tokens=5, n=3)
        async with engine.generate("hello", params) as generation:
            deltas = [delta async for delta in generation]

    assert [r.index for r in generation.results] == [0, 2]
    assert [type(e) for e in generation.errors.values()] == [SamplingFailed]
    assert list(generation.errors) == [1]
    assert "".join(d.text for d in deltas if d.index == 2) == expected("hello", 5)


async def test_if_all_fail_the_first_error_is_raised():
    """
    Reading and the results raise only when no output is left.
    """
    always = dict.fromkeys(range(20), DecodeStatus.FAILED)
    executor = FakeExecutor(fake_limits(), failures=always)
    async with fake_engine(executor) as engine:
        with pytest.raises(DecodeFailed):
            await engine.complete_n("hello", SamplingParams(n=2))


async def test_complete_takes_one_output():
    """
    complete() cannot give several results: it refuses and names what can.
    """
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="complete_n"):
            await engine.complete("hello", SamplingParams(n=2))


async def test_cancelling_the_task_ends_all():
    """
    A cancelled reader leaves no output running.
    """
    steps = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=steps)
    async with fake_engine(executor) as engine:
        async with anyio.create_task_group() as group:

            async def read() -> None:
                await engine.complete_n("hello", SamplingParams(n=3, max_tokens=50))

            group.start_soon(read)
            await anyio.to_thread.run_sync(steps.wait_for_one)
            group.cancel_scope.cancel()
        steps.allow(100)
        await engine.cache_stats()
        stats = engine.stats()

    assert stats.finished["cancelled"] == 3
