"""Threads of an engine for long work: they start with it, and end with it."""

import gc
import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.engine.mailbox import N_THREADS, Workers, answer_of
from pyllama_raw.errors import ClosedError, EngineStopped
from pyllama_raw.options.arguments import SENDER
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.engine.support import HANG_S
from tests.support.loops import anyio_backend  # noqa: F401

PARAMS = SamplingParams(max_tokens=2)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

NEAR_THE_END = """
import os, resource, anyio
from pyllama_raw import SamplingParams
from pyllama_raw.testing import fake_engine

PARAMS = SamplingParams(max_tokens=2, stop=("b" * 300,))

async def main():
    async with fake_engine() as engine:
        await engine.complete("a", PARAMS)
        n_pages = int(open("/proc/self/statm").read().split()[0])
        n_bytes = n_pages * resource.getpagesize() + 2**20
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(engine.complete, "a", PARAMS)
                group.start_soon(engine.cache_stats)
        print("done", flush=True)
        os._exit(0)

anyio.run(main)
"""

pytestmark = pytest.mark.anyio


class Stop(BaseException):
    """Nothing that a handler of Exception sees."""


@pytest.fixture
def workers():
    made = Workers()
    yield made
    made.close()
    made.join()


@pytest.fixture
def started(monkeypatch):
    """Names of the threads that are started from now on."""
    names = []
    start = threading.Thread.start

    def noting(thread):
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    return names


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_requests_are_served_near_the_end_of_the_address_space():
    """
    With a mebibyte left, which is no stack for a thread.
    """
    run = subprocess.run(
        [sys.executable, "-c", NEAR_THE_END],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert (run.stdout, run.returncode) == ("done\n", 0), run.stderr


async def test_no_request_starts_a_thread(started):
    """
    Long texts, rules, calls, chats and closing have the threads that came with the engine.
    """
    limits = fake_limits(n_ctx_slot=10_000, n_cells=40_000, n_batch=10_000)
    async with fake_engine(FakeExecutor(limits), chat_template=TEMPLATE) as engine:
        await engine.render([{"role": "user", "content": "a"}])  # starts a process
        started.clear()
        await engine.count("a" * 5000)
        await engine.complete("a", PARAMS)
        await engine.complete("a", SamplingParams(max_tokens=2, stop=("b" * 300,)))
        await engine.detokenize([97] * 20_000)
        await engine.render([{"role": "user", "content": "a"}])
        await engine.cache_stats()
        await engine.clear_cache()
        await engine.aclose(drain_s=1)

    assert started == []


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, Stop])
async def test_what_a_function_raises_comes_as_it_is(workers, error):
    """
    Its thread does the next work.
    """

    def fail():
        raise error("as told")

    for _ in range(3):
        with pytest.raises(error, match="as told"):
            await workers.run("adapters", fail)

    assert await workers.run("adapters", lambda: 7) == 7


async def test_who_is_cancelled_leaves_at_once(workers):
    """
    What has begun goes on alone; what waits behind it is not done.
    """
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        assert go_on.wait(HANG_S)
        done.append("begun")

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as group:
            group.start_soon(workers.run, "adapters", work)
            await workers.run("text", partial(begun.wait, HANG_S))
            group.start_soon(workers.run, "adapters", partial(done.append, "behind"))
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        go_on.set()
        await workers.run("adapters", lambda: None)

    assert done == ["begun"]


@asynccontextmanager
async def busy(workers):
    """A group whose work for the thread of adapters waits until the block ends."""
    start, go_on = threading.Event(), threading.Event()

    def work():
        start.set()
        assert go_on.wait(HANG_S)

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as group:
            group.start_soon(workers.run, "adapters", work)
            await workers.run("text", partial(start.wait, HANG_S))
            yield group
            go_on.set()


async def test_clients_take_turns(workers):
    """
    What one sends does not wait for all that another one sent before; each one's comes in order.
    """
    order = []

    async with busy(workers) as group:
        for client, name in [("a", "a1"), ("a", "a2"), ("a", "a3"), (None, "b1")]:
            note = partial(order.append, name)
            group.start_soon(workers.run, "adapters", note, client)
            await anyio.lowlevel.checkpoint()

    assert order == ["a1", "b1", "a2", "a3"]


async def test_work_without_a_client_is_that_of_its_sender(workers):
    """
    Counts of tokens of one connection do not wait for all of another one.
    """
    order = []

    async with busy(workers) as group:
        for sender, name in [("a", "a1"), ("a", "a2"), ("b", "b1")]:
            before = SENDER.set(sender)
            group.start_soon(workers.run, "adapters", partial(order.append, name))
            SENDER.reset(before)
            await anyio.lowlevel.checkpoint()

    assert order == ["a1", "b1", "a2"]


async def test_closing_ends_the_threads_and_waits_for_no_work():
    """
    What waits is refused, and what computes ends when it is done.
    """
    before = ours()
    workers = Workers()
    threads = ours() - before
    begun, go_on, errors = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        assert go_on.wait(HANG_S)

    async def wait_behind():
        try:
            await workers.run("adapters", lambda: None)
        except ClosedError as error:
            errors.append(error)

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as group:
            group.start_soon(workers.run, "adapters", work)
            await workers.run("text", partial(begun.wait, HANG_S))
            group.start_soon(wait_behind)
            await anyio.lowlevel.checkpoint()
            workers.close()
            workers.join()
            [busy] = threads & ours()
            with pytest.raises(ClosedError):
                await workers.run("text", lambda: None)
            go_on.set()
        busy.join(HANG_S)

    assert len(threads) == sum(N_THREADS.values())
    assert len(errors) == 1
    assert not threads & ours()


async def test_a_thread_that_cannot_start_leaves_no_other(monkeypatch):
    """
    The error of the system comes as it is.
    """
    before = ours()
    start = threading.Thread.start

    def fail(thread):
        if thread.name == "pyllama-rules":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        fake_engine()
    for thread in ours() - before:
        thread.join(HANG_S)

    assert ours() == before


async def test_a_process_that_was_forked_has_no_workers(workers, monkeypatch):
    """
    It is told so, and does not wait for ever.
    """
    monkeypatch.setattr(os, "getpid", lambda: 1)

    with pytest.raises(ClosedError, match="after the fork"):
        await workers.run("text", lambda: None)
    monkeypatch.undo()


async def test_an_answer_that_nobody_waits_for_is_cancelled():
    """
    So a call that waits in the engine's mailbox is not made.
    """
    async with fake_engine() as engine:
        answer = engine._thread.call(lambda: 7)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await answer_of(answer)

    assert answer.done()


def ours() -> set[threading.Thread]:
    """Threads of engines; event loops keep some of their own for a while."""
    return {each for each in threading.enumerate() if each.name.startswith("pyllama-")}


async def test_an_engine_that_failed_and_is_dropped_leaves_no_worker():
    """
    Nothing but the end of the object tells them.
    """

    def fail(step, plan):
        raise AssertionError("sabotage")

    engine = fake_engine(FakeExecutor(fake_limits(), on_step=fail))
    with pytest.raises(EngineStopped):
        await engine.complete("a", PARAMS)
    assert engine._thread.join(
        HANG_S
    )  # until then it has the error, which has the engine
    threads = ours()
    del engine
    gc.collect()
    for thread in threads:
        thread.join(HANG_S)

    assert not threads & ours()
