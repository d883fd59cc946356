"""Engines that have ended by themselves and are opened again."""

import threading

import anyio
import pytest

from pyllama_raw import AsyncEngine, EngineConfig, LogConfig, SamplingParams
from pyllama_raw.api.model import Opener
from pyllama_raw.errors import (
    ClosedError,
    DeadlineExceeded,
    EngineStopped,
    ModelLoadFailed,
)
from tests.api.test_reload import CONFIG, GREEDY, HANG_S, PROMPT, alone, n_weights
from tests.support.loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_adapter, tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]
SUPERVISED = CONFIG.model_copy(update={"max_restarts": 3})
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=7, ignore_eos=True)


def opened(config: EngineConfig = SUPERVISED):
    return AsyncEngine.open(tiny_model("llama"), config)


def break_executor(engine, *, n_failures: int, after: int) -> None:
    """Have *n_failures* steps raise, after so many that work."""
    executor = engine._parts.executor
    execute, steps = executor.execute, iter(range(10**9))

    def fail(plan):
        if plan.works and after <= next(steps) < after + n_failures:
            raise MemoryError("as told")
        return execute(plan)

    executor.execute = fail


def break_scheduler(engine) -> None:
    """Have the engine thread end at the next result."""

    def fail(*_):
        raise AssertionError("as told")

    engine._parts.scheduler.apply = fail


async def test_requests_survive_failures_of_steps():
    """
    Streams go on with the tokens of an undisturbed run, and those after them.
    """
    expected = await alone("llama", PARAMS)
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            break_executor(engine, n_failures=1, after=9)
            found = []
            async with anyio.create_task_group() as group:

                async def ask():
                    found.append((await engine.complete(PROMPT, PARAMS)).token_ids)

                group.start_soon(ask)
                group.start_soon(ask)
            rebuilds = engine.stats().rebuilds
            again = await engine.complete(PROMPT, PARAMS)

    assert found == [expected] * 2
    assert (rebuilds, again.token_ids) == (1, expected)


async def test_an_engine_that_has_ended_is_opened_again(tmp_path, caplog):
    """
    Its requests end with an error; those that come are done by the same object, and told.
    """
    log = LogConfig(request_log=tmp_path / "log.jsonl", max_requests=9)
    config = SUPERVISED.model_copy(update={"log": log})
    with anyio.fail_after(HANG_S):
        async with opened(config) as engine, engine.events() as events:
            await engine.load_adapter("a", tiny_adapter("lora-a"))
            with_adapter = await engine.complete(PROMPT, GREEDY, adapters={"a": 1.0})
            break_scheduler(engine)
            with pytest.raises(EngineStopped):
                await engine.complete(PROMPT, GREEDY)
            first = await engine.complete(PROMPT, GREEDY)
            second = await engine.complete(PROMPT, GREEDY, adapters={"a": 1.0})
            n_logged = len(engine.request_log())
            await engine.aclose()
            states = [
                str(e.state) async for e in events if not hasattr(e, "request_id")
            ]

    assert first.token_ids == await alone("llama")
    assert second.token_ids == with_adapter.token_ids
    assert n_logged == 3
    assert states.count("loading") == 1
    assert "error" not in states
    told = [r.getMessage() for r in caplog.records if r.name.endswith("engine.life")]
    assert [each.split(" in ")[0] for each in told] == [
        "the engine failed, restart 1 of at most 3"
    ]


async def test_one_restart_too_many_ends_it():
    """
    The fourth end in a minute is the last; whoever came to wait is told.
    """
    n_before = n_weights()
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            for _ in range(4):
                await engine.count("hello")
                break_scheduler(engine)
                with pytest.raises(EngineStopped):
                    await engine.complete(PROMPT, GREEDY)
            with pytest.raises(EngineStopped):
                await engine.count("hello")
            state = engine.state

    assert (state, n_weights()) == ("error", n_before)


async def test_a_model_that_cannot_be_had_again_ends_it(monkeypatch):
    """
    Each try counts; callers that wait get the error of the engine.
    """
    monkeypatch.setattr("pyllama_raw.api.session.RETRY_S", 0.0)
    with anyio.fail_after(HANG_S):
        async with opened() as engine:

            def fail(*_, **__):
                raise ModelLoadFailed("model", "as told")

            monkeypatch.setattr(Opener, "parts", fail)
            break_scheduler(engine)
            for _ in range(2):
                with pytest.raises(EngineStopped):
                    await engine.complete(PROMPT, GREEDY)
            state = engine.state
            monkeypatch.undo()
            await engine.reload()
            result = await engine.complete(PROMPT, GREEDY)

    assert (state, result.token_ids) == ("error", await alone("llama"))


async def test_a_caller_that_waits_too_long_hears_what_for(monkeypatch):
    """
    The engine did not sleep: it had ended by itself.
    """
    goes_on = threading.Event()
    with anyio.fail_after(HANG_S):
        async with opened() as engine:
            parts_of = Opener.parts

            def held(self, report, *, inheritance=None):
                goes_on.wait(HANG_S)
                return parts_of(self, report, inheritance=inheritance)

            monkeypatch.setattr(Opener, "parts", held)
            break_scheduler(engine)
            with pytest.raises(EngineStopped):
                await engine.complete(PROMPT, GREEDY)
            try:
                with pytest.raises(DeadlineExceeded, match="had ended by itself"):
                    await engine.complete(PROMPT, GREEDY, deadline_s=0.02)
            finally:
                goes_on.set()
            result = await engine.complete(PROMPT, GREEDY)

    assert result.token_ids == await alone("llama")


async def test_an_engine_can_be_closed_while_it_is_opened_again(monkeypatch):
    """
    Callers that wait end, and nothing is left.
    """
    n_before, begun, errors = n_weights(), anyio.Event(), []
    with anyio.fail_after(HANG_S):
        engine = await opened()
        parts_of = Opener.parts
        token = anyio.lowlevel.current_token()

        def held(self, report, *, inheritance=None):
            anyio.from_thread.run_sync(begun.set, token=token)
            anyio.from_thread.run(engine.aclose, token=token)
            return parts_of(self, report, inheritance=inheritance)

        monkeypatch.setattr(Opener, "parts", held)
        break_scheduler(engine)
        async with anyio.create_task_group() as group:

            async def ask():
                try:
                    await engine.complete(PROMPT, GREEDY)
                except (ClosedError, EngineStopped) as error:
                    errors.append(type(error))

            group.start_soon(ask)
            await begun.wait()
            group.start_soon(ask)
        for thread in threading.enumerate():
            if thread.name == "pyllama-restart":
                await anyio.to_thread.run_sync(thread.join, HANG_S)

    assert errors[0] is EngineStopped
    assert (len(errors), n_weights()) == (2, n_before)
