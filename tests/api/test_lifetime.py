"""Opening and closing engines, with and without care."""

import math
import subprocess
import sys
import threading

import anyio
import pytest

from pyllama_raw import AsyncEngine, FinishReason, PyllamaError, SamplingParams
from pyllama_raw.engine import opening as build_module
from pyllama_raw.errors import ClosedError, InvalidRequest
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits, fake_parts
from tests.engine.support import HANG_S, HeldSteps
from tests.support.loops import anyio_backend  # noqa: F401

PARAMS = SamplingParams(max_tokens=3)


@pytest.mark.anyio
async def test_a_hundred_engines_leave_nothing_behind():
    """
    Every engine frees its parts once and its thread ends.
    """
    released = []
    for number in range(100):
        async with fake_engine(release=lambda n=number: released.append(n)) as engine:
            await engine.complete("a", PARAMS)

    assert released == list(range(100))
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("pyllama")]


def test_an_engine_outlives_the_loop_that_used_it():
    """
    Readers of a closed event loop are given up; another loop goes on.
    """
    engine = fake_engine()

    async def leave_running():
        await engine.generate("a", SamplingParams(max_tokens=100))._start()

    async def use_and_close():
        async with engine:
            return await engine.complete("a", PARAMS)

    with pytest.warns(ResourceWarning, match="dropped"):
        anyio.run(leave_running)
    result = anyio.run(use_and_close)

    assert result.usage.completion_tokens == 3


def test_a_forgotten_engine_ends_its_thread():
    """
    Dropping the last reference closes the engine.
    """
    engine = fake_engine()
    thread = engine._thread
    kept = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="aclose"):
        kept.clear()

    assert thread.join(HANG_S)


@pytest.mark.parametrize(
    "body",
    [
        "await engine.complete('a', params)",
        "await engine.generate('a', params).__aenter__()",
        "await engine.complete('a', params); raise SystemExit(0)",
    ],
)
def test_the_interpreter_ends_without_close(body):
    """
    A program that never closes its engine ends by itself, with code 0.
    """
    program = f"""
import anyio
from pyllama_raw import SamplingParams
from pyllama_raw.testing import fake_engine
params = SamplingParams(max_tokens=100)
engine = fake_engine(release=lambda: print("released"))
async def main():
    {body}
anyio.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "released\n"


@pytest.mark.anyio
async def test_a_load_can_be_cancelled(monkeypatch, tmp_path):
    """
    Cancelling open() reaches the loader through its progress function.
    """
    started, answers = threading.Event(), []

    def build(path, config, needs, progress, kept):
        started.set()
        while progress(0.5):
            pass
        answers.append("stopped")
        raise PyllamaError("cancelled by the progress function")

    monkeypatch.setattr(build_module, "build", build)
    (tmp_path / "model.gguf").touch()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def open_it():
                async with AsyncEngine.open(tmp_path / "model.gguf"):
                    pass

            group.start_soon(open_it)
            await anyio.to_thread.run_sync(started.wait, HANG_S)
            scope.cancel()

    assert scope.cancelled_caught
    assert answers == ["stopped"]


@pytest.mark.anyio
async def test_a_load_that_was_faster_than_its_cancellation_is_freed(
    monkeypatch, tmp_path
):
    """
    Parts that nobody will use are released.
    """
    started, released = threading.Event(), []

    def build(path, config, needs, progress, kept):
        started.set()
        while progress(0.5):
            pass
        return fake_parts(release=lambda: released.append(True))

    monkeypatch.setattr(build_module, "build", build)
    (tmp_path / "model.gguf").touch()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def open_it():
                async with AsyncEngine.open(tmp_path / "model.gguf"):
                    pass

            group.start_soon(open_it)
            await anyio.to_thread.run_sync(started.wait, HANG_S)
            scope.cancel()

    assert released == [True]


@pytest.mark.anyio
async def test_open_tells_progress_and_errors_bare(monkeypatch, tmp_path):
    """
    The caller sees fractions while loading, and errors without a group around them.
    """
    fractions = []

    def build(path, config, needs, progress, kept):
        progress(0.25)
        progress(1.0)
        raise PyllamaError("no luck")

    monkeypatch.setattr(build_module, "build", build)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(PyllamaError, match="no luck"):
        async with AsyncEngine.open(tmp_path / "model.gguf", progress=fractions.append):
            pass

    assert fractions == [0.25, 1.0]


@pytest.mark.anyio
async def test_what_is_being_opened_has_a_state(monkeypatch, tmp_path):
    """
    It is idle before and after a failure, loading meanwhile, and then as the engine is.
    """
    states = []
    failures = [PyllamaError("no luck")]

    def build(path, config, needs, progress, kept):
        states.append(opening.state)
        if failures:
            raise failures.pop()
        return fake_parts()

    monkeypatch.setattr(build_module, "build", build)
    (tmp_path / "model.gguf").touch()
    opening = AsyncEngine.open(tmp_path / "model.gguf")
    states.append(opening.state)
    with pytest.raises(PyllamaError, match="no luck"):
        await opening
    states.append(opening.state)
    async with opening as engine:
        await engine.complete("a", PARAMS)
    states.append(opening.state)

    assert states == ["idle", "loading", "idle", "loading", "closed"]


@pytest.mark.anyio
async def test_tokenizing_holds_the_model_open():
    """
    The vocabulary is not freed while a worker thread reads it.
    """
    order, entered, go_on = [], threading.Event(), threading.Event()

    parts = fake_parts(
        FakeExecutor(fake_limits()), release=lambda: order.append("released")
    )
    tokenize = parts.vocab.tokenize

    def slow(text, **options):
        entered.set()
        assert go_on.wait(HANG_S)
        order.append("tokenized")
        return tokenize(text, **options)

    parts.vocab.tokenize = slow
    engine = AsyncEngine(parts)
    async with anyio.create_task_group() as group:

        async def complete():
            with pytest.raises(PyllamaError):
                await engine.complete("a" * 5000)

        group.start_soon(complete)
        await anyio.to_thread.run_sync(entered.wait, HANG_S)
        engine._thread.close()
        group.start_soon(engine.aclose)
        go_on.set()

    assert order == ["tokenized", "released"]


@pytest.mark.anyio
@pytest.mark.parametrize("drain_s", [HANG_S, math.inf])
async def test_a_drain_finishes_what_runs_and_waits(drain_s):
    """
    aclose(drain_s=...) gives whole results to all who were there, and refuses others.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=held)
    engine = fake_engine(executor)
    results, refused = [], []

    async def complete():
        results.append(await engine.complete("a", PARAMS))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(complete)
            await anyio.to_thread.run_sync(held.wait_for_one)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(engine.aclose, drain_s)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ClosedError) as caught:
                await engine.complete("b", PARAMS)
            refused.append(caught.value.results)
            held.allow(100)

    assert [r.finish_reason for r in results] == [FinishReason.LENGTH] * 3
    assert refused == [()]


@pytest.mark.anyio
async def test_what_is_left_after_a_drain_is_closed():
    """
    When the time is over, calls raise with the part that there is; streams end with it.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=2), on_step=held)
    engine = fake_engine(executor)
    errors = []

    async def complete_n():
        with pytest.raises(ClosedError) as caught:
            await engine.complete_n("b", SamplingParams(max_tokens=50, n=2))
        errors.append(caught.value)

    with anyio.fail_after(HANG_S):
        async with engine.generate("a", SamplingParams(max_tokens=50)) as generation:
            await anyio.to_thread.run_sync(held.wait_for_one)
            async with anyio.create_task_group() as group:
                group.start_soon(complete_n)
                held.allow(2)
                for _ in range(2):
                    await anyio.to_thread.run_sync(held.wait_for_one)
                group.start_soon(engine.aclose, 1e-3)
                await anyio.to_thread.run_sync(executor.flag.wait, HANG_S)
                held.allow(100)
            _ = [delta async for delta in generation]

    (error,) = errors
    reasons = [result.finish_reason for result in error.results]
    assert reasons == [FinishReason.CLOSED] * 2
    assert generation.result.finish_reason is FinishReason.CLOSED
    assert generation.result.usage.completion_tokens == 2
    assert generation.result.text


@pytest.mark.anyio
async def test_a_drain_can_be_given_up():
    """
    Cancelling aclose() ends what runs and still frees the engine.
    """
    held = HeldSteps()
    released = []
    executor = FakeExecutor(fake_limits(), on_step=held)
    engine = fake_engine(executor, release=lambda: released.append(True))

    async def let_go():
        await anyio.to_thread.run_sync(executor.flag.wait, HANG_S)
        held.allow(100)

    with anyio.fail_after(HANG_S):
        async with engine.generate("a", SamplingParams(max_tokens=50)) as generation:
            await anyio.to_thread.run_sync(held.wait_for_one)
            async with anyio.create_task_group() as group:
                group.start_soon(let_go)
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await engine.aclose(math.inf)

    assert scope.cancelled_caught
    assert released == [True]
    assert generation.result.finish_reason is FinishReason.CLOSED


@pytest.mark.anyio
@pytest.mark.parametrize("drain_s", [-1.0, math.nan])
async def test_a_drain_takes_a_time(drain_s):
    """
    A wrong time is told before anything is closed.
    """
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="drain_s"):
            await engine.aclose(drain_s)
        result = await engine.complete("a", PARAMS)

    assert result.finish_reason is FinishReason.LENGTH


class Stop(BaseException):
    """Nothing that a handler of Exception sees."""


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, Stop])
async def test_what_a_progress_function_raises_comes_as_it_is(
    monkeypatch, tmp_path, kind
):
    """
    No group is around it, whatever its class.
    """
    error = kind("enough")

    def build(path, config, needs, progress, kept):
        progress(0.5)

    def stop(fraction):
        raise error

    monkeypatch.setattr(build_module, "build", build)
    (tmp_path / "model.gguf").touch()
    with anyio.fail_after(HANG_S), pytest.raises(kind) as caught:
        async with AsyncEngine.open(tmp_path / "model.gguf", progress=stop):
            pass

    assert caught.value is error
