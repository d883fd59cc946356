"""The engine thread, on a real scheduler and a fake executor."""

import os
import threading
from random import Random

import pytest

from pyllama_raw.core.request import Finished, FinishReason, NewTokens
from pyllama_raw.core.step import DecodeStatus
from pyllama_raw.engine.mailbox import Refused
from pyllama_raw.errors import ClosedError, DecodeFailed, EngineStopped, QueueFull
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, HeldSteps, PlainLoop, PlainStream, make_thread


def test_events_come_in_order_and_end_with_finished(loop, started):
    """
    A stream gets one delta a token, then what the request ended with.
    """
    started(thread := make_thread())
    stream = PlainStream(loop)

    thread.submit_all((make_request(7, max_tokens=3),), stream)
    events = stream.read_to_end()

    assert [type(event) for event in events] == [
        NewTokens,
        NewTokens,
        NewTokens,
        Finished,
    ]
    assert events[-1].reason is FinishReason.LENGTH
    assert {event.request_id for event in events} == {7}


def test_one_wake_up_a_step_serves_all_streams(loop, started):
    """
    However many streams have news, their event loop is woken once a step.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    started(thread := make_thread(executor))
    streams = [PlainStream(loop) for _ in range(4)]
    thread.submit_all((make_request(0, n_prompt=1, max_tokens=1),), streams[0])
    held.wait_for_one()
    for i in (1, 2, 3):
        thread.submit_all((make_request(i, max_tokens=2),), streams[i])
    held.allow(100)
    for stream in streams:
        stream.read_to_end()

    assert len(loop.calls) <= executor.n_steps
    assert max(loop.calls) >= 3


def test_an_engine_has_one_thread(loop, started):
    """
    The thread that plans and delivers also wakes the readers.
    """
    before = set(threading.enumerate())
    started(thread := make_thread())
    stream = PlainStream(loop)
    thread.submit_all((make_request(max_tokens=8),), stream)
    stream.read_to_end()

    new = set(threading.enumerate()) - before
    assert [t.name for t in new] == ["pyllama-engine"]


def test_a_stream_that_wants_the_end_only_is_woken_once(loop, started):
    """
    A reader that collects costs one wake-up for all its tokens.
    """
    started(thread := make_thread())
    stream = PlainStream(loop)
    stream.eager = False

    thread.submit_all((make_request(max_tokens=8),), stream)
    events = stream.read_to_end()

    assert len(events) == 9
    assert loop.calls == [1]


def test_cancelling_all_requests_of_a_step_aborts_it(loop, started):
    """
    Nobody wants the step that runs: it stops, and the next one is not affected.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    started(thread := make_thread(executor))
    first, second = PlainStream(loop), PlainStream(loop)
    thread.submit_all((make_request(0),), first)
    held.wait_for_one()

    thread.cancel(0)
    aborted = executor.flag.is_set
    thread.submit_all((make_request(1, max_tokens=2),), second)
    held.allow(100)

    assert aborted
    assert first.read_to_end()[-1].reason is FinishReason.CANCELLED
    assert second.read_to_end()[-1].reason is FinishReason.LENGTH
    assert thread.stats.aborted_steps == 1
    assert not executor.flag.is_set


def test_a_step_that_somebody_wants_is_not_aborted(loop, started):
    """
    Cancelling one of two requests of a step lets the step end.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    started(thread := make_thread(executor))
    streams = [PlainStream(loop) for _ in range(3)]
    thread.submit_all((make_request(0),), streams[0])
    held.wait_for_one()
    thread.submit_all((make_request(1, max_tokens=6),), streams[1])
    thread.submit_all((make_request(2, max_tokens=6),), streams[2])
    held.allow()
    held.wait_for_one()

    thread.cancel(0)
    thread.cancel(1)
    aborted = executor.flag.is_set
    held.allow(100)

    assert not aborted
    assert streams[1].read_to_end()[-1].reason is FinishReason.CANCELLED
    assert streams[2].read_to_end()[-1].n_output == 6
    assert thread.stats.aborted_steps == 0


def test_an_executor_that_breaks_ends_every_stream(loop):
    """
    A bug in the executor ends the thread; nobody is left waiting.
    """
    bug = ZeroDivisionError("a bug")
    held = HeldSteps()

    def on_step(step, plan):
        held(step, plan)
        raise bug

    released = []
    thread = make_thread(
        FakeExecutor(fake_limits(), on_step=on_step),
        release=lambda: released.append(True),
    )
    streams = [PlainStream(loop) for _ in range(3)]
    thread.submit_all((make_request(0),), streams[0])
    held.wait_for_one()
    for i in (1, 2):
        thread.submit_all((make_request(i),), streams[i])
    answer = thread.call(lambda: 1)
    held.allow()

    for stream in streams:
        last = stream.read_to_end()[-1]
        assert isinstance(last, Refused)
        assert isinstance(last.error, EngineStopped)
        assert last.error.__cause__ is bug
    with pytest.raises(EngineStopped):
        answer.result(HANG_S)
    with pytest.raises(EngineStopped):
        thread.submit_all((make_request(3),), PlainStream(loop))
    assert thread.join(HANG_S)
    assert released == [True]
    thread.cancel(0)
    thread.close()


def test_a_failed_decode_is_counted_and_loses_nothing(loop, started):
    """
    The request has all its tokens, and statistics tell of the failure.
    """
    executor = FakeExecutor(fake_limits(), failures={1: DecodeStatus.FAILED})
    started(thread := make_thread(executor))
    stream = PlainStream(loop)

    thread.submit_all((make_request(0),), stream)
    end = stream.read_to_end()[-1]

    assert (end.reason, end.error) == (FinishReason.LENGTH, None)
    assert (thread.stats.failed_steps, thread.stats.rebuilds) == (1, 1)


def test_a_decode_that_always_fails_ends_its_request_and_not_the_engine(loop, started):
    """
    Statuses of the executor are no bugs: the next request is served.
    """
    executor = FakeExecutor(fake_limits(), poison={0: DecodeStatus.FAILED})
    started(thread := make_thread(executor))
    first, second = PlainStream(loop), PlainStream(loop)

    thread.submit_all((make_request(0),), first)
    failed = first.read_to_end()[-1]
    thread.submit_all((make_request(1),), second)
    served = second.read_to_end()[-1]

    assert isinstance(failed.error, DecodeFailed)
    assert served.reason is FinishReason.LENGTH


def test_close_ends_requests_with_what_they_have(loop):
    """
    Running requests finish as closed, later ones are refused, memory is freed once.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    released = []
    thread = make_thread(executor, release=lambda: released.append(True))
    stream = PlainStream(loop)
    thread.submit_all((make_request(0, max_tokens=50),), stream)
    held.allow(3)
    for _ in range(4):
        held.wait_for_one()

    thread.close()
    thread.close()
    held.allow(100)
    events = stream.read_to_end()

    assert thread.join(HANG_S)
    assert [type(event) for event in events] == [
        NewTokens,
        NewTokens,
        NewTokens,
        Finished,
    ]
    assert events[-1].reason is FinishReason.CLOSED
    assert released == [True]
    assert executor.opened == set()
    with pytest.raises(ClosedError):
        thread.submit_all((make_request(1),), stream)
    with pytest.raises(ClosedError):
        thread.call(lambda: None)


def test_what_is_submitted_during_a_step_counts_at_once(loop, started):
    """
    While one step runs the mailbox takes what may wait, and the poster hears of the rest.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=held)
    started(thread := make_thread(executor, max_waiting=2))
    streams = [PlainStream(loop) for _ in range(5)]
    thread.submit_all((make_request(0),), streams[0])
    held.wait_for_one()

    for i in (1, 2):
        thread.submit_all((make_request(i),), streams[i])
    refusals = []
    for i in (3, 4):
        with pytest.raises(QueueFull) as caught:
            thread.submit_all((make_request(i),), streams[i])
        refusals.append((caught.value.knob, caught.value.value, caught.value.limit))
    held.allow(100)
    ends = [streams[i].read_to_end()[-1].reason for i in range(3)]

    assert refusals == [("max_waiting", 3, 2)] * 2
    assert ends == [FinishReason.LENGTH] * 3
    assert thread.call(lambda: set(executor.opened)).result(HANG_S) == set()


def test_requests_of_a_closed_loop_are_cancelled(loop, started):
    """
    An event loop that is gone costs nothing more; others are served on.
    """
    dead = PlainLoop()
    dead.closed = True
    executor = FakeExecutor(fake_limits(n_ctx_slot=10**6, n_cells=10**7))
    started(thread := make_thread(executor))
    orphan, stream = PlainStream(dead), PlainStream(loop)

    thread.submit_all((make_request(0, max_tokens=10**6),), orphan)
    thread.submit_all((make_request(1, max_tokens=20),), stream)
    end = stream.read_to_end()[-1]
    while thread.call(lambda: bool(executor.opened)).result(HANG_S):
        pass  # the orphan would run for minutes

    assert end.n_output == 20
    assert orphan.events[-1].reason is FinishReason.CANCELLED


def test_a_deadline_passes_while_a_step_runs(loop, started):
    """
    The request ends after that step and keeps what it has.
    """
    now = [0.0]

    def on_step(step, plan):
        now[0] += 1.0

    executor = FakeExecutor(fake_limits(), on_step=on_step)
    started(thread := make_thread(executor, clock=lambda: now[0]))
    stream = PlainStream(loop)

    thread.submit_all((make_request(0, max_tokens=50, deadline=3.5),), stream)
    events = stream.read_to_end()

    assert events[-1].reason is FinishReason.DEADLINE
    assert events[-1].n_output == 4


def test_an_idle_engine_wakes_for_a_deadline(loop, started):
    """
    The thread does not wait for a command beyond the next deadline.
    """
    started(thread := make_thread())
    thread.driver.scheduler = _Sleeper(
        thread.driver.scheduler, deadline=thread.clock() + 0.01
    )
    thread.call(lambda: None).result(HANG_S)  # from here it sleeps on the new one

    assert thread.driver.scheduler.expired.wait(HANG_S)


class _Sleeper:
    """A scheduler with nothing to do but a deadline."""

    def __init__(self, scheduler, deadline):
        self._scheduler, self._deadline = scheduler, deadline
        self.expired = threading.Event()

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    @property
    def next_deadline(self):
        return None if self.expired.is_set() else self._deadline

    def schedule(self, now):
        if now >= self._deadline:
            self.expired.set()
        return self._scheduler.schedule(now)


def test_calls_run_in_the_engine_thread(loop, started):
    """
    A function sees a quiet scheduler; its exception is the caller's.
    """
    started(thread := make_thread())

    name = thread.call(lambda: threading.current_thread().name)
    failing = thread.call(lambda: 1 / 0)

    assert name.result(HANG_S) == "pyllama-engine"
    with pytest.raises(ZeroDivisionError):
        failing.result(HANG_S)
    assert thread.alive


def test_a_forked_child_cannot_use_the_engine(loop, started, monkeypatch):
    """
    The thread lives in the parent only: a child gets an error, not a hang.
    """
    started(thread := make_thread())
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)

    with pytest.raises(ClosedError, match="parent"):
        thread.submit_all((make_request(),), PlainStream(loop))
    assert not thread.join()
    thread.cancel(0)
    thread.close()
    monkeypatch.undo()


@pytest.mark.parametrize("seed", range(10))
def test_every_stream_ends_once_whatever_is_cancelled_when(loop, started, seed):
    """
    Threads submit and cancel at random: each stream ends once, nothing is left over.
    """
    rng = Random(seed)  # noqa: S311
    executor = FakeExecutor(
        fake_limits(n_slots=3, n_cells=160),
        failures={rng.randrange(60): DecodeStatus.FAILED, 5: DecodeStatus.NO_SPACE},
    )
    started(thread := make_thread(executor))
    streams = {i: PlainStream(loop) for i in range(60)}

    def work(ids, rng):
        for i in ids:
            sizes = {"n_prompt": rng.randint(1, 90), "max_tokens": rng.randint(1, 30)}
            thread.submit_all((make_request(i, **sizes),), streams[i])
            if rng.random() < 0.5:
                (thread.cancel if rng.random() < 0.8 else thread.forget)(
                    rng.choice(ids)
                )

    workers = [
        threading.Thread(target=work, args=(range(k, 60, 3), Random(k)))  # noqa: S311
        for k in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(HANG_S)
    ends = [streams[i].read_to_end()[-1] for i in streams]
    thread.call(thread.driver.scheduler.check_integrity).result(HANG_S)

    assert all(isinstance(end, Finished) for end in ends)
    assert all(not stream.events for stream in streams.values())
    assert thread.call(lambda: set(executor.opened)).result(HANG_S) == set()


def test_a_failure_to_free_is_told_to_the_next_caller(loop):
    """
    The thread ends anyway; later calls say what went wrong.
    """
    bug = ZeroDivisionError("a bug")

    def release():
        raise bug

    thread = make_thread(release=release)
    thread.close()
    assert thread.join(HANG_S)

    with pytest.raises(EngineStopped) as caught:
        thread.submit_all((make_request(),), PlainStream(loop))
    assert caught.value.__cause__ is bug
