"""Uses that cannot work are refused by name: nothing hangs, ends or comes to nothing."""

import asyncio
import copy
import pickle
from functools import partial

import anyio
import pytest

from pyllama_raw import AsyncEngine, Engine, Model, SamplingParams
from pyllama_raw.api import blocking as sync
from pyllama_raw.core.policies import SchedulingPolicy
from pyllama_raw.engine.info import EngineState
from pyllama_raw.engine.logs import Logs
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import WrongUse
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits, fake_parts
from tests.engine.support import HANG_S, HeldSteps
from tests.support.loops import anyio_backend  # noqa: F401

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "pickle 2": partial(pickle.dumps, protocol=2),
}
DOORS = {
    "complete": lambda engine: engine.complete("a", PARAMS),
    "generate": lambda engine: list(engine.generate("a", PARAMS)),
    "collect": lambda engine: engine.generate("a", PARAMS).collect(),
    "events": lambda engine: list(engine.events().__enter__()),
    "embed": lambda engine: engine.embed(["a"]),
    "cache_stats": lambda engine: engine.cache_stats(),
    "clear_cache": lambda engine: engine.clear_cache(),
    "load_adapter": lambda engine: engine.load_adapter("a", "b"),
    "count": lambda engine: engine.count("a" * 10**5),
    "close": lambda engine: engine.close(),
    "drain": lambda engine: engine.close(drain_s=1),
    "open": lambda engine: Engine.open("nothing.gguf"),
    "single call": lambda engine: sync.generate("a", model="nothing.gguf"),
}


async def read(engine):
    return [delta async for delta in engine.generate("a", PARAMS)]


async def watch(engine):
    async with engine.events():
        pass


ASYNC_DOORS = {
    "complete": lambda engine: engine.complete("a", PARAMS),
    "generate": read,
    "events": watch,
    "cache_stats": lambda engine: engine.cache_stats(),
    "clear_cache": lambda engine: engine.clear_cache(),
    "load_adapter": lambda engine: engine.load_adapter("a", "b"),
    "aclose": lambda engine: engine.aclose(),
}


class Asking:
    """Calls a door once, in the engine thread, and keeps what it raises."""

    def __init__(self) -> None:
        self.call = None
        self.errors = []

    def __call__(self, *_, **__):
        call, self.call = self.call, None
        if call is not None:
            try:
                call()
            except BaseException as error:
                self.errors.append(error)
                raise


def parts_of(where, asking):
    """Parts whose policy, watcher or step log is *asking*."""
    if where == "policy":
        hooks = {"name": "asking", "on_scheduled": asking}
        return fake_parts(policy=type("Policy", (SchedulingPolicy,), hooks)())
    if where == "watcher":
        watcher = type("Watching", (Watcher,), {"ended": asking})()
        return fake_parts(logs=Logs(requests=watcher))
    log = type("Log", (Watcher,), {"stepped": asking})()
    return fake_parts(logs=Logs(steps=log))


def open_blocking(parts):
    async def make():
        return AsyncEngine(parts)

    return Engine(make)


@pytest.mark.parametrize("where", ["policy", "watcher", "step log"])
@pytest.mark.parametrize("door", DOORS)
def test_nothing_in_the_engine_thread_waits_for_an_engine(where, door):
    """
    Each door says so at once, and the request that was under way is done.
    """
    asking = Asking()
    with open_blocking(parts_of(where, asking)) as engine:
        asking.call = partial(DOORS[door], engine)
        first = engine.complete("a", PARAMS)
        second = engine.complete("a", PARAMS)

    assert [type(error) for error in asking.errors] == [WrongUse]
    assert "let another thread call" in str(asking.errors[0])
    assert len(first.token_ids) == len(second.token_ids) == 3


@pytest.mark.parametrize("door", ASYNC_DOORS)
def test_an_event_loop_in_the_engine_thread_does_not_wait_either(door):
    """
    As when a hook runs one: each method that would wait for a step is refused.
    """
    asking = Asking()
    with open_blocking(parts_of("policy", asking)) as engine:

        async def ask():
            await ASYNC_DOORS[door](engine._awaited)

        asking.call = lambda: asyncio.run(ask())
        result = engine.complete("a", PARAMS)

    assert [type(error) for error in asking.errors] == [WrongUse]
    assert len(result.token_ids) == 3


@pytest.mark.parametrize("take", COPIES.values(), ids=COPIES)
def test_owners_are_not_copied(take):
    """
    Engines, models, streams and events refuse it, and work on.
    """
    with open_blocking(fake_parts()) as engine:
        model = Model.__new__(Model)
        things = [
            engine,
            engine._awaited,
            model,
            engine.generate("a"),
            engine.generate("a")._awaited,
            engine.events(),
            engine.events()._awaited,
        ]
        for thing in things:
            with pytest.raises(
                WrongUse, match=f"{type(thing).__name__} cannot be copied"
            ):
                take(thing)
        result = engine.complete("a", PARAMS)

    assert len(result.token_ids) == 3


@pytest.mark.anyio
async def test_a_second_reader_of_a_generation_is_refused():
    """
    Not while another task reads, and not after the end; who has left its loop goes on.
    """
    held = HeldSteps()
    executor = FakeExecutor(
        fake_limits(), on_step=lambda step, plan: plan.works and held(step, plan)
    )
    texts = []

    async def read_all(generation):
        texts.append([delta.text async for delta in generation])

    with anyio.fail_after(HANG_S):
        async with (
            fake_engine(executor) as engine,
            engine.generate("a", PARAMS) as generation,
        ):
            async with anyio.create_task_group() as group:
                group.start_soon(read_all, generation)
                await anyio.to_thread.run_sync(held.wait_for_one)
                for reading in (anext(generation), generation.collect()):
                    with pytest.raises(WrongUse, match="another task reads"):
                        await reading
                held.allow(3)
            with pytest.raises(WrongUse, match="read to its end"):
                await read_all(generation)
            assert await anext(generation, None) is None
            result = await generation.collect()
            async with engine.generate("a", PARAMS) as other:
                held.allow()
                first = [(await anext(other)).text]
                held.allow()
                async for delta in other:
                    first.append(delta.text)
                    break
                held.allow()
                first += [delta.text async for delta in other]

    assert ["".join(text) for text in [*texts, first]] == [result.text] * 2


def test_an_engine_that_is_not_open_yet_has_no_verbs():
    """
    Who forgets `await` is told so. Python's warning is for coroutines alone.
    """
    opening = AsyncEngine.open("nothing.gguf")

    with pytest.raises(AttributeError, match=r"'complete' before .* await AsyncEngine"):
        _ = opening.complete
    assert copy.copy(opening).state == opening.state == EngineState.IDLE


def test_a_second_blocking_reader_is_refused():
    """
    A `for` over a generation that was read to its end says so.
    """
    with (
        open_blocking(fake_parts()) as engine,
        engine.generate("a", PARAMS) as generation,
    ):
        text = "".join(delta.text for delta in generation)
        with pytest.raises(WrongUse, match="read to its end"):
            list(generation)

        assert generation.result.text == text


@pytest.mark.anyio
async def test_a_second_reader_of_events_is_refused():
    """
    It would take some of the events that the first one waits for.
    """
    begun = anyio.Event()

    async def read_two(events):
        async for _ in events:
            begun.set()

    with anyio.fail_after(HANG_S):
        async with (
            anyio.create_task_group() as group,
            fake_engine() as engine,
            engine.events() as events,
        ):
            group.start_soon(read_two, events)
            await begun.wait()
            with pytest.raises(WrongUse, match="another task reads"):
                await anext(events)
            group.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("other", ["asyncio", "trio"])
async def test_a_reader_in_another_event_loop_is_refused(other):
    """
    It could not be woken there. Whoever reads in the loop that began goes on.
    """
    held = HeldSteps()
    executor = FakeExecutor(
        fake_limits(), on_step=lambda step, plan: plan.works and held(step, plan)
    )

    async def read_all(things):
        return [thing async for thing in things]

    async def read_elsewhere():
        with anyio.fail_after(HANG_S):
            for things in (generation, events):
                with pytest.raises(WrongUse, match="another event loop"):
                    await read_all(things)  # what is there can be taken anywhere

    with anyio.fail_after(HANG_S):
        async with (
            fake_engine(executor) as engine,
            engine.generate("a", PARAMS) as generation,
            engine.events() as events,
        ):
            await anyio.to_thread.run_sync(held.wait_for_one)
            elsewhere = partial(anyio.run, read_elsewhere, backend=other)
            await anyio.to_thread.run_sync(elsewhere)
            held.allow(3)
            result = await generation.collect()

    assert len(result.token_ids) == 3
