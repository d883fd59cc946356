"""Requests for vectors are requests: counted, told, bounded and waited for like all others."""

import threading
from typing import Any

import anyio
import pytest

from pyllama_raw import LogConfig, QueueFull, SamplingParams, SchedulerConfig
from pyllama_raw.api.events import RequestEvent
from pyllama_raw.api.metrics import EngineMetrics
from pyllama_raw.engine.embed_executor import MAX_CONTEXTS
from pyllama_raw.engine.info import Pooling
from pyllama_raw.errors import ContextFailed, DeadlineExceeded
from tests.api.embedding_support import TEXTS, open_engine

pytestmark = [pytest.mark.anyio, pytest.mark.native]

LOGS = LogConfig(max_steps=100, max_requests=100)
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def engine_threads() -> int:
    names = [thread.name for thread in threading.enumerate()]
    return names.count("pyllama-engine")


@pytest.mark.parametrize("name", ["bert", "qwen3-embedding"])
async def test_logs_and_counts_have_texts(name):
    """
    Statistics, the logs of requests and steps, metrics and events know what was asked.
    """
    async with open_engine(name, log=LOGS) as engine:
        metrics = EngineMetrics(engine)
        counts = [len(await engine.tokenize(text)) for text in TEXTS[:3]]
        n_tokens = sum(counts)
        async with engine.events() as events:
            await engine.embed(TEXTS[:3])
            with pytest.raises(DeadlineExceeded):
                await engine.embed(["a"], deadline_s=1e-9)
            await engine.aclose()
            told = [e async for e in events if isinstance(e, RequestEvent)]
        stats, text = engine.stats(), metrics.text()
        records, steps = engine.request_log(), engine.step_log()

    assert (stats.submitted, stats.running, stats.waiting) == (2, 0, 0)
    assert (stats.finished["stop"], stats.finished["deadline"]) == (1, 1)
    assert (stats.computed_tokens, stats.output_tokens) == (n_tokens, 0)
    assert stats.decode_s > 0.99 * sum(step.decode_s for step in steps) > 0
    assert [(r.request_id, r.why, r.n_output, r.max_tokens) for r in records] == [
        (1, "stop", 0, 0),
        (2, "deadline", 0, 0),
    ]
    assert (records[0].n_prompt, records[0].hash_ids) == (n_tokens, ())
    assert sum(n for step in steps for _, _, n in step.chunks) == n_tokens
    assert [(event.request_id, event.state, event.why) for event in told] == [
        (1, "waiting", None),
        (1, "running", None),
        (1, "ended", "stop"),
        (2, "waiting", None),
        (2, "ended", "deadline"),
    ]
    assert 'pyllama_raw:requests_ended_total{why="stop"} 1.0' in text
    assert "vllm:prefix_cache_queries_total 0.0" in text


async def test_results_say_how_many_tokens_texts_had():
    """
    An array has the usage of its texts, a rank the tokens of query and document.
    """
    async with open_engine("bert") as engine:
        counts = [len(await engine.tokenize(text)) for text in TEXTS[:3]]
        vectors = await engine.embed(TEXTS[:3])
        tokens = await engine.embed_tokens(TEXTS[:3])
    async with open_engine("bert-rank", log=LOGS) as engine:
        ranked = await engine.rank("what", ["a", "hello"])
        (record,) = engine.request_log()

    assert vectors.usage.prompt_tokens == vectors[0].usage.prompt_tokens == sum(counts)
    assert vectors.usage.completion_tokens == 0
    assert [rows.usage.prompt_tokens for rows in tokens] == counts
    assert {one.index: one.n_tokens for one in ranked}[0] > 1
    assert sum(one.n_tokens for one in ranked) == record.n_prompt


async def test_one_thread_makes_texts_and_vectors():
    """
    The first call to embed() opens a context, and no other engine.
    """
    before = engine_threads()
    async with open_engine("qwen3-embedding", log=LOGS) as engine:
        await engine.complete("hello", GREEDY)
        await engine.embed(TEXTS)
        stats, n_threads = engine.stats(), engine_threads() - before
        ids = [record.request_id for record in engine.request_log()]

    assert (n_threads, ids, stats.submitted) == (1, [1, 2], 2)


async def test_the_limit_of_the_queue_is_one_for_texts_and_prompts():
    """
    While an engine of one slot embeds, nothing may wait: a second request is refused.
    """
    refused: list[Any] = []
    only = SchedulerConfig(n_slots=1, max_waiting=0)
    async with open_engine("qwen3-embedding", scheduler=only) as engine:
        told = anyio.Event()

        async def embed() -> None:
            await engine.embed(TEXTS * 20, progress=lambda _: told.set())

        async with anyio.create_task_group() as group:
            group.start_soon(embed)
            await told.wait()
            for call in (engine.complete("a", GREEDY), engine.embed(["a"])):
                with pytest.raises(QueueFull) as caught:
                    await call
                refused.append(caught.value.knob)
        vectors = await engine.embed(["a"])

    assert (refused, len(vectors)) == (["max_waiting"] * 2, 1)


async def test_draining_waits_for_texts():
    """
    What runs when the engine is closed gets all its vectors.
    """
    found: list[Any] = []
    engine = await open_engine("qwen3-embedding")
    told = anyio.Event()

    async def embed() -> None:
        found.append(await engine.embed(TEXTS * 5, progress=lambda _: told.set()))

    async with anyio.create_task_group() as group:
        group.start_soon(embed)
        await told.wait()
        states = [engine.health().state, engine.stats().running]
        await engine.aclose(drain_s=60)

    assert (len(found[0]), states) == (5 * len(TEXTS), ["ready", 1])


async def test_texts_that_nobody_wants_change_no_stream():
    """
    The abort of their steps leaves the tokens of a stream as they are alone.
    """
    async with open_engine("qwen3-embedding") as engine:
        alone = await engine.complete("hello", GREEDY)
        await engine.embed(["a"])
        results: list[Any] = []

        async def complete() -> None:
            results.append(await engine.complete("hello", GREEDY))

        async with anyio.create_task_group() as group:
            group.start_soon(complete)
            for _ in range(10):
                with anyio.CancelScope() as scope:
                    cancel = lambda _, scope=scope: scope.cancel()  # noqa: E731
                    await engine.embed(TEXTS * 5, progress=cancel)
        again = await engine.embed(["a"])

    assert results[0].token_ids == alone.token_ids
    assert again.shape == (1, 64)


async def test_few_contexts_are_kept():
    """
    Whatever poolings are asked for in turn, only those of the last ones stay.
    """
    async with open_engine("bert") as engine:
        for pooling in ("mean", "cls", "last", "mean"):
            await engine.embed(["a"], pooling=pooling)
        await engine.embed_tokens(["a"])
        kept = list(engine._parts.texts._contexts)

    assert kept == [Pooling.MEAN, Pooling.NONE]
    assert len(kept) == MAX_CONTEXTS


async def test_a_context_that_cannot_be_made_is_an_error_of_the_call(monkeypatch):
    """
    The caller is told, the engine goes on, and the next call tries again.
    """

    def fail(_: object) -> None:
        raise ContextFailed("llama_init_from_model", None, "as told")

    async with open_engine("qwen3-embedding") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._parts.texts, "_make_context", fail)
            with pytest.raises(ContextFailed):
                await engine.embed(["a"])
        result = await engine.complete("hello", GREEDY)
        vectors = await engine.embed(["a"])

    assert (len(result.token_ids), vectors.shape) == (40, (1, 64))


async def test_vectors_that_are_there_need_no_worker():
    """
    A call whose last vector comes while the engine ends has its array all the same.
    """
    texts = TEXTS[:3] * 100  # so many that a worker would copy their vectors
    async with open_engine("bert") as engine:

        def told(n_done: int) -> None:
            if n_done == len(texts):
                engine._sessions.workers.close()

        vectors = await engine.embed(texts, progress=told)

    assert vectors.shape == (300, 64)


async def test_only_many_characters_are_read_by_a_worker(monkeypatch):
    """
    A few short texts change no thread before they are computed, nor do their vectors.
    """
    kinds = []
    async with open_engine("bert") as engine:
        workers = engine._sessions.workers
        run = workers.run

        def note(kind, function):
            kinds.append(kind)
            return run(kind, function)

        await engine.embed(["a"])  # its context is made by a worker
        monkeypatch.setattr(workers, "run", note)
        await engine.embed(["a", "b"])
        n_of_few = len(kinds)
        await engine.embed(["some words"] * 500)

    assert n_of_few == 0
    assert set(kinds) == {"text"}
