"""Reload on tiny models: requests go on, whatever is loaded beside them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Event

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    Engine,
    EngineConfig,
    LogConfig,
    Model,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.api.model import Opener
from pyllama_raw.engine import shared_models
from pyllama_raw.errors import (
    AdapterLoadFailed,
    ClosedError,
    ConfigError,
    EngineStopped,
    ModelNotFound,
    PyllamaError,
    WrongUse,
)
from pyllama_raw.results import Watcher
from pyllama_raw.testing import fake_engine
from tests.support.limits import LIMIT_S
from tests.support.native_loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_adapter, tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]
HANG_S = LIMIT_S
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=1024, n_batch=64, n_ubatch=64, n_threads=1),
    scheduler=SchedulerConfig(n_slots=2),
)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, temperature=0.8, seed=3, ignore_eos=True)
PROMPT = [5, 6, 7, 8]


def opened(name="llama", config=CONFIG):
    return AsyncEngine.open(tiny_model(name), config)


def n_weights() -> int:
    return len(shared_models._models)


async def alone(name, params=GREEDY, config=CONFIG):
    """The tokens of an engine that does nothing else."""
    async with opened(name, config) as engine:
        return (await engine.complete(PROMPT, params)).token_ids


@contextmanager
def held(engine: AsyncEngine) -> Iterator[None]:
    """No step of its session begins within the block, so what runs is there at its end."""
    executor, may_begin = engine._parts.executor, Event()
    execute = executor.execute

    def wait(plan):
        assert may_begin.wait(LIMIT_S)
        return execute(plan)

    executor.execute = wait
    try:
        yield
    finally:
        may_begin.set()


async def test_no_request_fails_while_another_model_comes():
    """
    Each request has the tokens of the old or of the new one; the old one's weights go.
    """
    models = "llama", "qwen2"
    expected = [await alone(name) for name in models]
    stopped, results, n_before = anyio.Event(), [], n_weights()

    async def ask(engine):
        while not stopped.is_set():
            results.append(await engine.complete(PROMPT, GREEDY))

    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(ask, engine)
                for i in range(6):
                    await engine.reload(tiny_model(models[(i + 1) % 2]))
                    n_served = len(results)
                    while len(results) < n_served + 8:
                        await checkpoint()
                stopped.set()
            await anyio.to_thread.run_sync(wait_for_old, engine)
            n_after = n_weights()
            last = await engine.complete(PROMPT, GREEDY)

    tokens = [each.token_ids for each in results]
    assert {*tokens} == {*expected}
    assert (n_after, last.token_ids) == (n_before + 1, expected[0])


def wait_for_old(engine) -> None:
    for session in engine._sessions.all[:-1]:
        session.thread.gone.result(HANG_S)


async def test_what_came_before_is_done_by_the_old_one():
    """
    It ends as it would have, and the old weights are gone once it has ended.
    """
    expected = [await alone("llama", LONG), await alone("qwen2")]
    with anyio.fail_after(HANG_S):
        async with opened() as engine, engine.generate(PROMPT, LONG) as generation:
            await anext(generation)
            with held(engine):
                await engine.reload(tiny_model("qwen2"))
                n_both = n_weights()
            names = engine.info.metadata["general.architecture"]
            new = await engine.complete(PROMPT, GREEDY)
            old = await generation.collect()
            await anyio.to_thread.run_sync(wait_for_old, engine)
            n_left = n_weights()

    assert [old.token_ids, new.token_ids] == expected
    assert (names, n_both - n_left) == ("qwen2", 1)


async def test_a_deep_sleep_waits_for_the_old_one_too():
    """
    Afterwards no weights are left, neither of the new one nor of the old one.
    """
    expected, n_before = await alone("llama", LONG), n_weights()
    with anyio.fail_after(HANG_S):
        async with opened() as engine, engine.generate(PROMPT, LONG) as generation:
            await anext(generation)
            with held(engine):
                await engine.reload(tiny_model("qwen2"))
                n_both = n_weights()
            await engine.sleep(2)
            n_asleep = n_weights()
            old = await generation.collect()

    assert old.token_ids == expected
    assert (n_both - n_before, n_asleep - n_before) == (2, 0)


async def test_a_generation_that_has_not_begun_gets_the_new_one():
    """
    Its session is the one that is there when it begins.
    """
    async with opened() as engine:
        generation = engine.generate(PROMPT, GREEDY)
        await engine.reload(tiny_model("qwen2"))
        async with generation:
            result = await generation.collect()

    assert result.token_ids == await alone("qwen2")


async def test_a_reload_that_fails_leaves_the_old_one(tmp_path):
    """
    Wrong arguments, no file, a damaged one, too large a context; then another one works.
    """
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_model("llama").read_bytes()[:5000])
    huge = CONFIG.model_copy(update={"context": ContextConfig(n_ctx=2**31 - 1)})
    exact = CONFIG.model_copy(update={"deterministic": True})
    expected, found, errors = await alone("llama"), [], []
    wrong = [
        {"model": 7},
        {"config": 7},
        {"model": tmp_path / "missing.gguf"},
        {"model": damaged},
        {"config": huge},
        {"model": tiny_model("t5"), "config": exact},  # it has no such option
    ]
    async with opened() as engine:
        before = engine.info
        for arguments in wrong:
            with pytest.raises(PyllamaError) as caught:
                await engine.reload(**arguments)
            errors.append(type(caught.value))
            found.append((await engine.complete(PROMPT, GREEDY)).token_ids)
        assert engine.info is before
        n_before = n_weights()
        await engine.reload(tiny_model("qwen2"))
        other = await engine.complete(PROMPT, GREEDY)
        await engine.reload()
        again = await engine.complete(PROMPT, GREEDY)

    assert errors[:3] == [ConfigError, ConfigError, ModelNotFound]
    assert {*found} == {expected}
    assert n_before == n_weights() + 1
    assert other.token_ids == again.token_ids == await alone("qwen2")


async def test_a_model_that_has_replaced_its_file_is_served(tmp_path):
    """
    reload() without arguments reads the file again, and shares no weights of the old one.
    """
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())
    async with AsyncEngine.open(path, CONFIG) as engine:
        old = await engine.complete(PROMPT, GREEDY)
        new_file = tmp_path / "new.gguf"
        new_file.write_bytes(tiny_model("qwen2").read_bytes())
        new_file.replace(path)
        await engine.reload()
        new = await engine.complete(PROMPT, GREEDY)

    assert [old.token_ids, new.token_ids] == [
        await alone("llama"),
        await alone("qwen2"),
    ]


async def test_another_config_or_a_model_object_is_taken():
    """
    Weights are shared where options of the model are equal; the config stays for later.
    """
    wider = CONFIG.model_copy(update={"scheduler": SchedulerConfig(n_slots=3)})
    async with opened() as engine, Model.open(tiny_model("qwen2")) as model:
        n_before = n_weights()
        await engine.reload(config=wider)
        slots = [engine.stats().n_slots]
        await engine.reload(model)
        slots.append(engine.stats().n_slots)
        await engine.complete(PROMPT, GREEDY)
        await anyio.to_thread.run_sync(wait_for_old, engine)
        n_after = n_weights()

    assert slots == [3, 3]
    assert (n_before, n_after) == (2, 1)


async def test_memory_for_both_is_not_needed_after_a_sleep():
    """
    Requests wait between sleep(2) and reload(), and are done by the new one.
    """
    with anyio.fail_after(HANG_S):
        async with opened() as engine, anyio.create_task_group() as group:
            found = []

            async def ask():
                found.append((await engine.complete(PROMPT, GREEDY)).token_ids)

            await engine.sleep(2)
            n_asleep = n_weights()
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ModelNotFound):
                await engine.reload("missing.gguf")
            state = engine.state
            await engine.reload(tiny_model("qwen2"))

    assert (n_asleep, state) == (0, "sleeping")
    assert found == [await alone("qwen2")]


class Told(Watcher):
    """Ids of requests, and states."""

    def __init__(self):
        self.came_ids, self.ended_ids, self.states = [], [], []

    def came(self, requests, submitted):
        self.came_ids += [each.request_id for each in requests]

    def ended(self, request, end):
        self.ended_ids.append(end.request_id)

    def engine(self, state, now):
        self.states.append(str(state))


async def test_watchers_and_logs_go_on(tmp_path):
    """
    They are told of both, in one file; ids are unique, and nobody hears of the old one's end.
    """
    path, watcher = tmp_path / "requests.jsonl", Told()
    log = LogConfig(request_log=path, max_requests=9)
    config = CONFIG.model_copy(update={"log": log})
    with anyio.fail_after(HANG_S):
        async with opened(config=config) as engine, engine.events() as events:
            engine.watch(watcher)
            async with engine.generate(PROMPT, LONG) as generation:
                await anext(generation)
                await engine.reload(tiny_model("qwen2"))
                await engine.complete(PROMPT, GREEDY)
                await generation.collect()
            await engine.sleep(2)
            await engine.wake()
            await engine.complete(PROMPT, GREEDY)
            in_memory = [each.request_id for each in engine.request_log()]
            engine.unwatch(watcher)
            await engine.aclose()
            ids = [e.request_id async for e in events if hasattr(e, "request_id")]
    in_file = [json.loads(line)["request_id"] for line in path.read_text().splitlines()]

    assert watcher.came_ids == [1, 2, 3]
    assert [*map(sorted, (watcher.ended_ids, in_file, in_memory))] == [[1, 2, 3]] * 3
    assert {*ids} == {1, 2, 3}
    assert "closed" not in watcher.states
    assert "closing" not in watcher.states


async def test_a_cache_directory_is_had_by_both(tmp_path):
    """
    The next one finds the files of the one before it.
    """
    cache = CacheConfig(directory=tmp_path, max_disk_bytes=2**26)
    config = CONFIG.model_copy(update={"cache": cache})
    prompt = list(range(5, 205))
    with anyio.fail_after(HANG_S):
        async with opened(config=config) as engine:
            await engine.complete(prompt, GREEDY)
            await engine.reload()
            await anyio.to_thread.run_sync(wait_for_old, engine)
            await engine.reload()
            result = await engine.complete(prompt, GREEDY)

    assert result.usage.cached_tokens > 100


async def test_adapters_come_along_or_refuse_the_model():
    """
    Of one architecture they serve on; the other model is of no use with them.
    """
    async with opened() as engine:
        await engine.load_adapter("a", tiny_adapter("lora-a"))
        before = await engine.complete(PROMPT, GREEDY, adapters={"a": 1.0})
        await engine.reload()
        after = await engine.complete(PROMPT, GREEDY, adapters={"a": 1.0})
        with pytest.raises(AdapterLoadFailed):
            await engine.reload(tiny_model("bloom"))
        still = await engine.complete(PROMPT, GREEDY, adapters={"a": 1.0})
        names = [each.name for each in engine.adapters()]

    assert before.token_ids == after.token_ids == still.token_ids
    assert names == ["a"]


async def test_a_reload_can_be_cancelled_and_closed_meanwhile(monkeypatch):
    """
    The old one goes on, or is closed; nothing of the new one is left.
    """
    n_before, progress = n_weights(), count()
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            for _ in range(3):
                with anyio.move_on_after(0):
                    await engine.reload(tiny_model("qwen2"))
            await engine.reload(tiny_model("qwen2"), progress=lambda _: next(progress))
            with pytest.raises(ZeroDivisionError):
                await engine.reload(progress=lambda _: 1 / 0)
            await engine.complete(PROMPT, GREEDY)
            closes = anyio.Event()
            parts_of = Opener.parts

            def held(self, report, *, inheritance=None):
                parts = parts_of(self, report, inheritance=inheritance)
                anyio.from_thread.run(engine.aclose)
                return parts

            monkeypatch.setattr(Opener, "parts", held)
            with pytest.raises(ClosedError):
                await engine.reload(tiny_model("bloom"))
            closes.set()

    assert (engine.state, n_weights()) == ("closed", n_before)
    assert next(progress) > 0


async def test_an_engine_that_has_failed_is_had_again():
    """
    Its requests have ended with an error; reload() makes the same object serve.
    """
    with anyio.fail_after(HANG_S):
        async with opened() as engine:

            def fail(_):
                raise RuntimeError("as told")

            engine._parts.executor.execute = fail
            with pytest.raises(EngineStopped):
                await engine.complete(PROMPT, GREEDY)
            state = engine.state
            await engine.reload()
            result = await engine.complete(PROMPT, GREEDY)

    assert (state, result.token_ids) == ("error", await alone("llama"))


async def test_an_engine_of_parts_knows_no_model():
    """
    It has to be given one.
    """
    async with fake_engine() as engine:
        with pytest.raises(WrongUse, match="give one"):
            await engine.reload()
        with pytest.raises(WrongUse, match="level 1"):
            await engine.sleep(2)
        await engine.sleep()
        await engine.wake()
        await engine.reload(tiny_model("llama"), CONFIG)
        result = await engine.complete(PROMPT, GREEDY)

    assert result.token_ids == await alone("llama")


def test_facts_of_a_blocking_engine_are_those_of_the_new_one():
    """
    Any thread may ask, and closing frees all.
    """
    n_before = n_weights()
    with Engine.open(tiny_model("llama"), CONFIG) as engine:
        engine.reload(tiny_model("qwen2"))
        name = engine.info.metadata["general.architecture"]
        n_tokens = len(engine.complete(PROMPT, GREEDY).token_ids)

    assert (name, n_tokens, n_weights()) == ("qwen2", 8, n_before)
