"""Engines that embed: beside other work, cancelled, closed and dropped."""

from typing import Any

import anyio
import numpy as np
import pytest

from pyllama_raw import AsyncEngine, Model, SamplingParams
from pyllama_raw.engine.info import Pooling
from pyllama_raw.errors import ClosedError
from tests.api.embedding_support import TEXTS, config, open_engine
from tests.support.last_digits import assert_near
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]


async def test_one_engine_generates_and_embeds():
    """
    What is generated beside 300 texts is what is generated alone.
    """
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    async with open_engine("qwen3-embedding") as engine:
        alone = await engine.complete("hello", greedy)
        vectors = await engine.embed(["hello"])
        results: dict[str, Any] = {}

        async def embed() -> None:
            results["vectors"] = await engine.embed(["hello"] * 300)

        async with anyio.create_task_group() as group:
            group.start_soon(embed)
            beside = await engine.complete("hello", greedy)

    assert beside.token_ids == alone.token_ids
    assert_near(results["vectors"], np.repeat(vectors, 300, 0), 1e-6)


async def test_calls_with_other_poolings_run_side_by_side():
    """
    Each has its own vectors, whoever shares the engine.
    """
    async with open_engine("bert") as engine:
        expected = {p: await engine.embed(TEXTS, pooling=p) for p in ("mean", "cls")}
        found: dict[str, list[Any]] = {"mean": [], "cls": []}

        async def embed(pooling: Any) -> None:
            found[pooling].append(await engine.embed(TEXTS, pooling=pooling))

        async with anyio.create_task_group() as group:
            for pooling in ["mean", "cls"] * 4:
                group.start_soon(embed, pooling)

    for pooling, arrays in found.items():
        assert len(arrays) == 4
        for array in arrays:
            assert_near(array, expected[pooling], 1e-6)


async def test_progress_is_told():
    """
    The numbers rise, and the last one is that of the texts.
    """
    told: list[int] = []
    async with open_engine("bert") as engine:
        await engine.embed(TEXTS, progress=told.append)

    assert told == sorted(told)
    assert told[-1] == len(TEXTS)


async def test_a_call_that_is_cancelled_leaves_nothing():
    """
    Its request ends, and the engine goes on.
    """
    async with open_engine("bert") as engine:
        with anyio.CancelScope() as scope:
            await engine.embed(TEXTS * 50, progress=lambda _: scope.cancel())
        await engine.embed(["a"])
        stats = engine.stats()

    assert scope.cancelled_caught
    assert (stats.running, stats.waiting) == (0, 0)


async def test_closing_ends_what_runs():
    """
    The call that waits is told, as every later one.
    """
    engine = await open_engine("bert")
    told = anyio.Event()

    async def embed() -> None:
        with pytest.raises(ClosedError):
            await engine.embed(TEXTS * 100, progress=lambda _: told.set())

    async with anyio.create_task_group() as group:
        group.start_soon(embed)
        await told.wait()
        await engine.aclose()
    with pytest.raises(ClosedError):
        await engine.embed(["a"])


async def test_engines_share_the_weights_of_an_encoder():
    """
    A Model serves several engines, and outlives none of them too early.
    """
    async with Model.open(tiny_model("bert")) as model:
        async with (
            AsyncEngine.open(model, config()) as one,
            AsyncEngine.open(model, config()) as other,
        ):
            vectors = [await engine.embed(TEXTS[:3]) for engine in (one, other)]

    assert_near(*vectors, 1e-6)


async def test_an_engine_that_is_dropped_frees_the_contexts_of_texts():
    """
    The one thread of the engine does that when it ends.
    """
    held = [await open_engine("qwen3-embedding")]
    await held[0].embed(["a"])
    thread, texts = held[0]._thread, held[0]._parts.texts
    was_ready = texts.is_ready(Pooling.LAST)

    with pytest.warns(ResourceWarning, match="dropped before aclose"):
        held.clear()

    assert thread.join(LIMIT_S)
    assert (was_ready, texts.is_ready(Pooling.LAST)) == (True, False)
