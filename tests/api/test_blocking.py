"""The engine that waits."""

import inspect
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from pyllama_raw import AsyncEngine, Engine, FinishReason, SamplingParams
from pyllama_raw.api.blocking import _Loop
from pyllama_raw.errors import ClosedError, InvalidRequest
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.engine.support import HANG_S, HeldSteps
from tests.support.loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_model

PARAMS = SamplingParams(max_tokens=4, temperature=0)


def blocking(**options) -> Engine:
    async def make() -> AsyncEngine:
        return fake_engine(**options)

    return Engine(make)


def verbs(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_fork_is_told_whose_engine_it_has(monkeypatch):
    """
    Its threads stayed with the parent, where the engine is open as before.
    """
    with blocking() as engine:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 1)
            with pytest.raises(ClosedError, match="after the fork"):
                engine.complete("a", PARAMS)

        assert engine.alive


def test_it_has_the_same_verbs():
    """
    What AsyncEngine can do Engine can do, with the same arguments.
    """
    same = verbs(AsyncEngine) & verbs(Engine) - {"open"}
    functions = [n for n in same if inspect.isfunction(getattr(Engine, n))]

    assert verbs(AsyncEngine) - {"aclose"} == verbs(Engine) - {"close"}
    for name in functions:
        theirs, ours = (
            inspect.signature(getattr(k, name)) for k in (AsyncEngine, Engine)
        )
        assert list(theirs.parameters.values()) == list(ours.parameters.values())


def test_every_verb_gives_what_the_async_one_does():
    """
    Results come out as they are, whichever verb was waited for.
    """
    with blocking() as engine:
        one = engine.complete("a", PARAMS)
        many = engine.complete_many(["a", "b"], PARAMS)
        forks = engine.complete_n("a", SamplingParams(max_tokens=4, n=2))
        with engine.generate("a", PARAMS) as generation:
            text = "".join(delta.text for delta in generation)
        collected = engine.generate("a", PARAMS).collect()
        n_tokens = engine.count("ab")
        stats, scored = engine.stats(), engine.score("ab")

    assert many[0].text == one.text == text == generation.result.text == collected.text
    assert (len(many), len(forks), n_tokens) == (2, 2, 3)
    assert stats.finished["length"] == 7
    assert len(scored.logprobs) == 2
    assert engine.stats().state == "closed"


def test_any_thread_may_call():
    """
    Threads share the steps of one engine.
    """
    with blocking() as engine, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: engine.complete("a", PARAMS), range(16)))

    assert len({result.text for result in results}) == 1


def test_errors_come_out_as_they_are():
    """
    The caller sees the error itself, and the engine goes on.
    """
    with blocking() as engine:
        with pytest.raises(InvalidRequest):
            engine.complete("a", PARAMS, deadline_s=-1)
        with pytest.raises(InvalidRequest), engine.generate(7):
            pass
        result = engine.complete("a", PARAMS)

    assert result.finish_reason is FinishReason.LENGTH


def test_what_fails_to_open_leaves_no_thread():
    """
    The error of opening is that of AsyncEngine.
    """

    async def fail() -> AsyncEngine:
        raise InvalidRequest("a", 1, "2")

    with pytest.raises(InvalidRequest):
        Engine(fail)

    assert "pyllama-loop" not in [thread.name for thread in threading.enumerate()]


def test_closing_ends_what_runs_and_can_be_repeated():
    """
    A reader in another thread gets what there was; later calls say that it is closed.
    """
    steps, results = HeldSteps(), []
    engine = blocking(executor=FakeExecutor(fake_limits(), on_step=steps))
    reader = threading.Thread(
        target=lambda: results.append(engine.generate("a", PARAMS).collect())
    )
    reader.start()
    steps.wait_for_one()
    closer = threading.Thread(target=engine.close)
    closer.start()
    while engine.alive:  # until the engine has heard of it
        os.sched_yield()
    steps.allow(100)
    for thread in (closer, reader):
        thread.join(HANG_S)
    engine.close()

    assert [result.finish_reason for result in results] == [FinishReason.CLOSED]
    for call in (lambda: engine.complete("a"), engine.cache_stats):
        with pytest.raises(ClosedError):
            call()


def test_leaving_the_block_ends_the_request():
    """
    A stream that is left early is cancelled, and what it had can be read.
    """
    with blocking() as engine:
        with engine.generate("a", SamplingParams(max_tokens=100)) as generation:
            next(generation)
        engine.complete("a", PARAMS)
        stats = engine.stats()

    assert stats.finished["cancelled"] + stats.finished["length"] == 2
    assert generation.result.text


def test_an_interrupted_wait_ends_its_request():
    """
    Ctrl-C ends the request that was waited for, and the engine goes on.
    """
    steps = HeldSteps()

    def interrupt() -> None:
        steps.wait_for_one()
        os.kill(os.getpid(), signal.SIGINT)

    with blocking(executor=FakeExecutor(fake_limits(), on_step=steps)) as engine:
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            engine.complete("a", SamplingParams(max_tokens=100))
        other.join(HANG_S)
        for _ in range(5):  # rounds of the loop, in which the task hears of it
            engine._loop.run(anyio.lowlevel.checkpoint)
        steps.allow(1000)
        engine.complete("b", PARAMS)
        stats = engine.stats()

    assert (stats.finished["cancelled"], stats.finished["length"]) == (1, 1)


def test_a_forgotten_engine_ends_its_threads():
    """
    Dropping the last reference closes the engine and its event loop.
    """
    engine = blocking()
    loop, thread = engine._loop._thread, engine._thread
    kept = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="aclose"):
        kept.clear()
    loop.join(HANG_S)

    assert (loop.is_alive(), thread.join(HANG_S)) == (False, True)


def test_a_finaliser_waits_for_no_event_loop():
    """
    The garbage collector runs it in any thread, such as that of an engine.
    """
    loop, busy = _Loop(), threading.Event()
    loop._portal.start_task_soon(busy.wait)
    finaliser = threading.Thread(target=loop.leave, daemon=True)
    finaliser.start()
    finaliser.join(HANG_S)
    has_left = not finaliser.is_alive()
    busy.set()
    loop._thread.join(HANG_S)

    assert (has_left, loop._thread.is_alive()) == (True, False)


def test_a_finaliser_in_the_thread_of_its_event_loop_ends_that():
    """
    Garbage is collected there, too.
    """
    loop = _Loop()

    async def leave() -> None:
        loop.leave()

    loop.run(leave)
    loop._thread.join(HANG_S)

    assert not loop._thread.is_alive()


def test_the_interpreter_ends_without_close():
    """
    A program that never closes its engine ends by itself, with code 0.
    """
    program = """
from pyllama_raw import Engine, SamplingParams
from pyllama_raw.testing import fake_engine
async def make():
    return fake_engine(release=lambda: print("released"))
engine = Engine(make)
engine.complete("a", SamplingParams(max_tokens=3))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "released\n", "")


@pytest.mark.anyio
async def test_it_works_beside_a_running_loop():
    """
    A thread whose event loop runs may call; it waits.
    """
    with blocking() as engine:
        result = engine.complete("a", PARAMS)

    assert len(result.token_ids) == 4


@pytest.mark.native
def test_a_real_model_answers():
    """
    open() loads a model, and close() frees it.
    """
    with Engine.open(tiny_model("llama")) as engine:
        result = engine.complete("hello", PARAMS)

    assert len(result.token_ids) >= 1


@pytest.mark.native
@pytest.mark.anyio
async def test_an_engine_can_be_awaited():
    """
    `await AsyncEngine.open()` gives the engine that `async with` gives.
    """
    with anyio.fail_after(HANG_S):
        engine = await AsyncEngine.open(tiny_model("llama"))
        try:
            result = await engine.complete("hello", PARAMS)
        finally:
            await engine.aclose()

    assert len(result.token_ids) >= 1
