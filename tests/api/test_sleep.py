"""Sleep and wake on tiny models: memory is freed, and everybody goes on as if nothing had been."""

import threading
from functools import partial

import anyio
import psutil
import pytest
from anyio.lowlevel import checkpoint

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    Engine,
    EngineConfig,
    Model,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.engine import shared_models
from pyllama_raw.errors import (
    ClosedError,
    ContextFailed,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    SnapshotFailed,
    WrongUse,
)
from pyllama_raw.results import FinishReason
from tests.support.held import check_held
from tests.support.limits import LIMIT_S
from tests.support.native_loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_adapter, tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]
HANG_S = LIMIT_S
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=1024, n_batch=64, n_ubatch=64, n_threads=1),
    scheduler=SchedulerConfig(n_slots=2, max_waiting=2),
)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(max_tokens=300, temperature=0.8, seed=3, ignore_eos=True)
CHAT = "once upon a time there was a llama that slept a lot"


def opened(name="llama", config=CONFIG):
    return AsyncEngine.open(tiny_model(name), config)


def n_weights() -> int:
    """The models that are loaded."""
    return len(shared_models._models)


def outcome(result):
    """The tokens, how likely each was, and how many of the prompt were cached."""
    return result.token_ids, result.logprobs, result.usage.cached_tokens


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2vl", "gemma3", "mamba", "jamba"])
async def test_a_chat_goes_on_after_a_sleep(name, level):
    """
    The tokens and the cached tokens of its next turn are those of an engine that was awake.
    """
    found = []
    for sleeps in (False, True):
        async with opened(name) as engine:
            first = await engine.complete(CHAT, GREEDY)
            if sleeps:
                await engine.sleep(level)
                await engine.wake()
            found.append(outcome(await engine.complete(CHAT + first.text, GREEDY)))

    assert found[0] == found[1]
    assert found[0][2] > 0


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        CONFIG.model_copy(update={"deterministic": True}),
        CONFIG.model_copy(update={"cache": CacheConfig(mode="off")}),
        CONFIG.model_copy(update={"cache": CacheConfig(mode="snapshots")}),
    ],
    ids=["default", "deterministic", "off", "snapshots"],
)
async def test_requests_that_run_stop_and_go_on(config):
    """
    Both give the tokens of a run that was not disturbed, drawn ones too; nothing is computed twice.
    """
    prompts = [CHAT, CHAT + ", and then"]
    found = []
    for sleeps in (False, True):
        async with opened(config=config) as engine, anyio.create_task_group() as group:
            results = {}

            async def run(engine, i, results):
                results[i] = await engine.complete(prompts[i], SEEDED)

            async with engine.events() as events:
                for i in range(len(prompts)):
                    group.start_soon(run, engine, i, results)
                n_running = 0
                while n_running < len(prompts):
                    event = await anext(events)
                    n_running += getattr(event, "request_id", 0) and (
                        event.state == "running"
                    )
            if sleeps:
                await engine.sleep()
                is_sleeping = engine.state, engine.health().state, engine.alive
                n_before = len(results)
                await engine.wake()
            with anyio.fail_after(HANG_S):
                while len(results) < len(prompts):
                    await checkpoint()
            found.append([results[i].token_ids for i in sorted(results)])
            n_computed = engine.stats().computed_tokens

    assert found[0] == found[1]
    assert (is_sleeping, n_before) == (("sleeping", "sleeping", True), 0)
    assert n_computed <= sum(len(CHAT) + 30 + 300 for _ in prompts)


async def test_cells_that_slots_share_are_shared_after_a_sleep():
    """
    Two outputs of one prompt fill the context; without sharing they would not fit it.
    """
    config = CONFIG.model_copy(update={"context": ContextConfig(n_ctx=256)})
    params = SamplingParams(max_tokens=20, n=2, seed=1, ignore_eos=True)
    prompt, found = list(range(5, 195)), []
    for sleeps in (False, True):
        async with opened(config=config) as engine:
            async with engine.generate(prompt, params) as generation:
                await anext(generation)
                if sleeps:
                    await engine.sleep()
                    await engine.wake()
                results = await generation.collect_all()
            found.append([each.token_ids for each in results])
            n_without_space = engine.stats().no_space_steps

    assert found[0] == found[1]
    assert n_without_space == 0


@pytest.mark.parametrize("level", [1, 2])
async def test_requests_that_come_wait_and_end_by_their_deadline(level):
    """
    They do not wake the engine; the others are served once it is woken.
    """
    with anyio.fail_after(HANG_S):
        async with opened() as engine, anyio.create_task_group() as group:
            alone = await engine.complete(CHAT, GREEDY)
            await engine.sleep(level)
            reason = None
            try:
                late = await engine.complete(CHAT, GREEDY, deadline_s=0.02)
                reason = late.finish_reason
            except DeadlineExceeded:
                reason = FinishReason.DEADLINE
            results = []

            async def ask():
                results.append(await engine.complete(CHAT, GREEDY))

            group.start_soon(ask)
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            if level == 2:
                with pytest.raises(QueueFull, match="max_waiting"):
                    await ask()
            assert engine.state == "sleeping"
            await engine.wake()

    assert reason is FinishReason.DEADLINE
    assert [each.token_ids for each in results] == 2 * [alone.token_ids]


async def test_level_two_frees_the_weights_once_nobody_runs():
    """
    It waits for those that run; a Model of the program keeps its weights.
    """
    n_before = n_weights()
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            async with (
                engine.generate(CHAT, SEEDED) as generation,
                anyio.create_task_group() as group,
            ):
                await anext(generation)
                group.start_soon(engine.sleep, 2)
                await anyio.wait_all_tasks_blocked()
                whole = await generation.collect()
            n_asleep = n_weights()
            stats, slots = await engine.cache_stats(), await engine.slots()
            await engine.sleep(1)  # it sleeps already
            await engine.wake()
            n_awake = n_weights()
            await engine.wake()
        async with (
            Model.open(tiny_model("llama")) as model,
            AsyncEngine.open(model, CONFIG) as engine,
        ):
            await engine.sleep(2)
            n_with_model = n_weights()
            await engine.wake()

    assert (len(whole.token_ids), slots, stats.n_queries) == (300, (), 1)
    assert (n_asleep, n_awake, n_with_model) == (n_before, n_before + 1, n_before + 1)


async def test_a_sleep_deepens_only_without_requests():
    """
    Those that stopped where they are need the weights.
    """
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            async with engine.generate(CHAT, SEEDED) as generation:
                await anext(generation)
                await engine.sleep(1)
                with pytest.raises(WrongUse, match="need its weights"):
                    await engine.sleep(2)
                await engine.wake()
                result = await generation.collect()
            await engine.sleep(1)
            n_before = n_weights()
            await engine.sleep(2)
            n_after = n_weights()
            await engine.wake()
            again = await engine.complete(CHAT, SEEDED)

    assert (result.token_ids, n_after) == (again.token_ids, n_before - 1)


async def test_a_wake_that_ends_early_sleeps_on_or_is_a_wake():
    """
    Who cancels one when its weights are there has an engine that is awake, and is told so.
    """

    async def leave(engine, scope):
        while engine.health().state != "starting":
            await checkpoint()
        while engine.health().state == "starting":
            await checkpoint()
        scope.cancel()

    with anyio.fail_after(HANG_S):
        async with opened() as engine, anyio.create_task_group() as group:
            await engine.sleep(2)
            with anyio.CancelScope() as scope:
                group.start_soon(leave, engine, scope)
                await engine.wake()
            state = engine.health().state

    assert (scope.cancelled_caught, str(state)) == (False, "ready")


async def test_what_changes_an_engine_runs_alone():
    """
    Levels are two; another verb of life, one that needs a context, and a reload are refused.
    """
    async with opened() as engine:
        with pytest.raises(InvalidRequest, match="level"):
            await engine.sleep(3)
        await engine.sleep()
        for verb in (engine.warmup, lambda: engine.rebuild_session("x"), engine.reload):
            with pytest.raises(WrongUse, match="sleep"):
                await verb()
        await engine.wake()
        async with engine.generate(CHAT, SEEDED) as generation:
            await anext(generation)
            async with anyio.create_task_group() as group:
                group.start_soon(engine.sleep, 2)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(WrongUse, match="another task changes the engine"):
                    await engine.wake()
                group.cancel_scope.cancel()
            result = await generation.collect()
        assert (await engine.complete(CHAT, SEEDED)).token_ids == result.token_ids


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_sleeps_can_be_closed(level):
    """
    Requests that wait end, and nothing of the model is left.
    """
    n_before = n_weights()
    with anyio.fail_after(HANG_S):
        engine = await opened()
        async with engine.events() as events, anyio.create_task_group() as group:
            await engine.sleep(level)
            errors = []

            async def ask():
                try:
                    await engine.complete(CHAT, GREEDY)
                except ClosedError as error:
                    errors.append(error)

            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await engine.aclose()
            states = [
                str(e.state) async for e in events if not hasattr(e, "request_id")
            ]

    assert (len(errors), engine.state) == (1, "closed")
    assert [states[0], states[-1]] == ["ready", "closed"]
    assert "sleeping" in states
    assert n_weights() == n_before


async def test_what_cannot_be_done_changes_nothing(monkeypatch):
    """
    Without host memory it goes on; without memory for a context it sleeps on.
    """
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            first = await engine.complete(CHAT, GREEDY)
            context = engine._parts.executor.context

            def refuse(*_):
                raise SnapshotFailed("as told", 0, "no copy")

            monkeypatch.setattr(context, "capture", refuse)
            for level in (1, 2):
                with pytest.raises(SnapshotFailed):
                    await engine.sleep(level)
            monkeypatch.undo()
            states = [engine.state]
            await engine.sleep()
            executor = engine._parts.executor
            make = executor._make_context

            def fail(_):
                raise ContextFailed("as told", None, "no memory")

            executor._make_context = fail
            with pytest.raises(ContextFailed):
                await engine.wake()
            states.append(engine.state)
            executor._make_context = make
            await engine.wake()
            again = await engine.complete(CHAT + first.text, GREEDY)

    assert states == ["ready", "sleeping"]
    assert again.usage.cached_tokens > 0


async def test_a_file_that_is_gone_or_another_one(tmp_path):
    """
    The engine sleeps on; woken with another file it serves that, without old prefixes.
    """
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())
    async with AsyncEngine.open(path, CONFIG) as engine:
        await engine.complete(CHAT, GREEDY)
        await engine.sleep(2)
        path.unlink()
        with pytest.raises(ModelNotFound):
            await engine.wake()
        states = [engine.state]
        path.write_bytes(tiny_model("qwen2").read_bytes())
        await engine.wake()
        states.append(engine.state)
        result = await engine.complete(CHAT, GREEDY)
    async with AsyncEngine.open(tiny_model("qwen2"), CONFIG) as other:
        expected = await other.complete(CHAT, GREEDY)

    assert states == ["sleeping", "ready"]
    assert outcome(result) == outcome(expected)


async def test_events_tell_of_a_sleep():
    """
    One stream tells all of it, over the sessions of the engine.
    """
    async with opened() as engine, engine.events() as events:
        await engine.sleep()
        await engine.wake()
        await engine.sleep(2)
        await engine.wake()
        await engine.complete(CHAT, GREEDY)
        await engine.aclose()
        states = [str(event.state) async for event in events]

    assert states == [
        *("ready", "sleeping", "ready", "sleeping", "loading", "ready"),
        *("waiting", "running", "running", "ended", "ready", "closing", "closed"),
    ]


async def test_a_wake_that_is_cancelled_leaves_all_as_it_was(monkeypatch):
    """
    The session that came too late has changed nothing of what the next one goes on with.
    """
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            before = await engine.complete(CHAT, GREEDY)
            await engine.sleep(1)
            await engine.clear_cache()  # slots are emptied by the next step
            await engine.sleep(2)
            make = engine._sessions._open
            with anyio.CancelScope() as scope:

                def make_too_late(*args, **options):
                    session = make(*args, **options)
                    for _ in range(2):  # what comes between two answers is over
                        session.thread.call(lambda: None).result(HANG_S)
                    anyio.from_thread.run_sync(scope.cancel)
                    return session

                monkeypatch.setattr(engine._sessions, "_open", make_too_late)
                await engine.wake()
            monkeypatch.undo()
            state = engine.state
            await engine.wake()
            check_held(engine._parts)
            after = await engine.complete(CHAT, GREEDY)
            stats = engine.stats()

    assert (scope.cancelled_caught, state) == (True, "sleeping")
    assert outcome(after) == outcome(before)
    assert stats.failed_steps == 0


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_that_is_cancelled_leaves_the_engine_awake(level, monkeypatch):
    """
    Also where the engine thread was freeing the context, so nobody waits for a wake.
    """
    began, may_go_on = threading.Event(), threading.Event()

    def held(suspend):
        began.set()
        assert may_go_on.wait(HANG_S)
        return suspend()

    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            executor = engine._parts.executor
            suspend = partial(held, executor.suspend)
            monkeypatch.setattr(executor, "suspend", suspend)
            async with anyio.create_task_group() as group:
                group.start_soon(engine.sleep, level)
                await anyio.to_thread.run_sync(began.wait)
                group.cancel_scope.cancel()
            may_go_on.set()
            result = await engine.complete(CHAT, GREEDY)

    assert len(result.token_ids) == 8


@pytest.mark.parametrize("level", [1, 2])
async def test_adapters_survive_a_sleep(level):
    """
    A request names them as before.
    """
    async with opened() as engine:
        await engine.load_adapter("a", tiny_adapter("lora-a"))
        before = await engine.complete(CHAT, GREEDY, adapters={"a": 1.0})
        await engine.sleep(level)
        await engine.wake()
        after = await engine.complete(CHAT, GREEDY, adapters={"a": 1.0})

    assert before.token_ids == after.token_ids
    assert after.usage.cached_tokens > 0


@pytest.mark.parametrize("name", ["llama", "llama-embed", "bert"])
@pytest.mark.parametrize("level", [1, 2])
async def test_vectors_are_the_same_after_a_sleep(name, level):
    """
    Calls that come while the engine sleeps make no context; they get theirs afterwards.
    """
    with anyio.fail_after(HANG_S):
        async with opened(name) as engine, anyio.create_task_group() as group:
            before = await engine.embed([CHAT], pooling="mean")
            await engine.sleep(level)
            found = []

            async def embed():
                found.append(await engine.embed([CHAT], pooling="mean"))

            group.start_soon(embed)
            await anyio.wait_all_tasks_blocked()
            assert not getattr(engine._parts.texts, "_contexts", {})
            await engine.wake()

    assert found[0].tolist() == before.tolist()


def test_an_engine_without_an_event_loop_sleeps():
    """
    The verbs of a blocking engine wait.
    """
    with Engine.open(tiny_model("llama"), CONFIG) as engine:
        first = engine.complete(CHAT, GREEDY)
        engine.warmup()
        for level in (1, 2):
            engine.sleep(level)
            state = engine.state
            engine.wake()
        engine.rebuild_session("as told")
        engine.reload()
        second = engine.complete(CHAT, GREEDY)

    assert state == "sleeping"
    assert first.token_ids == second.token_ids


async def test_a_hundred_sleeps_leave_nothing_behind():
    """
    A chat goes on after each, with equal tokens and cached tokens; memory stays flat.
    """
    rss, found = [], set()
    async with opened() as engine:
        first = await engine.complete(CHAT, GREEDY)
        await engine.complete(CHAT + first.text, GREEDY)
        for i in range(100):
            await engine.sleep(1 + i % 2)
            await engine.wake()
            result = await engine.complete(CHAT + first.text, GREEDY)
            found.add((result.token_ids, result.usage.cached_tokens))
            rss.append(psutil.Process().memory_info().rss)

    assert len(found) == 1
    assert max(rss[50:]) <= 1.05 * max(rss[10:50])
