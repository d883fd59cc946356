"""Closing an engine thread: at once, or when what it has is done."""

import pytest

from pyllama_raw.core.request import Finished, FinishReason
from pyllama_raw.core.step import StepPlan, StepResult
from pyllama_raw.errors import ClosedError
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, HeldSteps, PlainStream, make_thread


class Busy:
    """A thread of one slot: one request runs, two wait, a third one is just posted."""

    def __init__(self, loop, started):
        self.held = HeldSteps()
        self.executor = FakeExecutor(fake_limits(n_slots=1), on_step=self.held)
        started(thread := make_thread(self.executor))
        self.thread, self.loop = thread, loop
        self.streams = [PlainStream(loop) for _ in range(3)]
        self.submit(0)
        self.held.wait_for_one()
        for i in (1, 2):
            self.submit(i)

    def submit(self, i):
        self.thread.submit_all((make_request(i, max_tokens=5),), self.streams[i])

    def ends(self):
        return [stream.read_to_end()[-1].reason for stream in self.streams]


@pytest.fixture
def busy(loop, started):
    return Busy(loop, started)


def test_draining_does_what_was_taken_and_refuses_more(busy):
    """
    What runs and what waits is finished, new requests and calls are refused at once.
    """
    busy.thread.close(drains=True)
    with pytest.raises(ClosedError):
        busy.thread.submit_all((make_request(9),), PlainStream(busy.loop))
    with pytest.raises(ClosedError):
        busy.thread.call(lambda: None)
    busy.held.allow(100)

    assert busy.ends() == [FinishReason.LENGTH] * 3
    assert busy.thread.join(HANG_S)
    assert busy.thread.stats.aborted_steps == 0


def test_the_end_of_a_drain_aborts_the_step(busy):
    """
    A second close() ends the rest as closed, with what it has.
    """
    busy.thread.close(drains=True)
    busy.held.allow(2)
    for _ in range(2):
        busy.held.wait_for_one()

    busy.thread.close()
    aborting = busy.executor.flag.is_set
    busy.held.allow(100)
    ends = [stream.read_to_end()[-1] for stream in busy.streams]

    assert aborting
    assert [(end.reason, end.n_output) for end in ends] == [
        (FinishReason.CLOSED, 2),
        (FinishReason.CLOSED, 0),
        (FinishReason.CLOSED, 0),
    ]
    assert busy.thread.join(HANG_S)


def test_a_drain_does_not_revive_a_closed_engine(busy):
    """
    close() stays what it was if a drain is asked for later.
    """
    busy.thread.close()
    busy.thread.close(drains=True)
    busy.held.allow(100)

    assert busy.ends() == [FinishReason.CLOSED] * 3
    assert busy.thread.join(HANG_S)


def test_a_caller_may_leave_during_a_drain(busy):
    """
    The result says who ended the request: here the caller, though the engine closes.
    """
    busy.thread.close(drains=True)
    busy.thread.cancel(0)
    busy.thread.cancel(1)
    busy.held.allow(100)

    assert busy.ends() == [
        FinishReason.CANCELLED,
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]
    assert busy.thread.join(HANG_S)


def test_an_idle_engine_drains_at_once(started):
    """
    Without a request there is nothing to wait for.
    """
    started(thread := make_thread())

    thread.close(drains=True)

    assert thread.join(HANG_S)


def test_readers_hear_of_the_end_before_files_are_written(loop):
    """
    What slots hold is written when nobody waits any more.
    """
    told = []

    class Files:
        report = None

        def drain(self):
            """Nothing is written."""

    thread = make_thread(files=Files())
    stream = PlainStream(loop)

    def last_plans():
        told.append(stream._news.wait(HANG_S))
        yield StepPlan()

    thread.driver.scheduler.last_plans = last_plans
    thread.driver.executor.execute = lambda plan: StepResult()
    thread._door.enter((make_request(0),), stream, 0.0)
    thread.driver.scheduler.add(make_request(0), 0.0)

    thread.close()

    assert thread.join(HANG_S)
    assert told == [True]
    assert isinstance(stream.events[-1], Finished)
