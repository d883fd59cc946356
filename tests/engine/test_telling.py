"""When readers are told of a step: before anything that takes time is begun."""

from pyllama_raw.core.request import Finished, NewTokens
from pyllama_raw.core.step import Release, StepPlan
from pyllama_raw.errors import EngineStalled
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, PlainStream, make_thread


class WatchedExecutor(FakeExecutor):
    """Before it runs operations its readers must have been told of the step before."""

    def __init__(self, limits):
        super().__init__(limits)
        self.streams = []
        self.told = []  # for each plan with operations: whether all readers were

    def execute(self, plan):
        if plan.moves:
            waiting = [stream for stream in self.streams if stream.events]
            self.told.append(all(s.woken.wait(HANG_S) for s in waiting))
        for stream in self.streams:
            stream.woken.clear()
        return super().execute(plan)


class WatchedStream(PlainStream):
    """Its events stay; `woken` is the flag that its reader waits for."""

    __slots__ = ()

    @property
    def woken(self):
        return self._news


def test_tokens_are_told_before_the_next_steps_operations(loop, started):
    """
    A reader need not wait for what the memory has to do for somebody else.
    """
    executor = WatchedExecutor(fake_limits(n_slots=2))
    started(thread := make_thread(executor))
    first = WatchedStream(loop)
    executor.streams.append(first)
    others = [PlainStream(loop) for _ in range(6)]
    thread.submit_all((make_request(0, max_tokens=60),), first)
    for i, stream in enumerate(others, 1):  # their ends release slots
        thread.submit_all((make_request(i, max_tokens=3),), stream)

    for stream in others:
        stream.read_to_end()
    while not (first.events and isinstance(first.events[-1], Finished)):
        assert thread.call(lambda: True).result(HANG_S)

    assert executor.told
    assert all(executor.told)


def test_a_plan_of_operations_only_tells_too(loop, started):
    """
    Nothing is computed by such a plan, and its readers are told all the same.
    """
    started(thread := make_thread())
    stream = PlainStream(loop)
    thread.submit_all((make_request(0, max_tokens=2),), stream)
    stream.read_to_end()
    told = []

    class Operations:
        """A scheduler that has a memory operation to do, and an event before it."""

        def __init__(self, scheduler):
            self._scheduler = scheduler
            self._events = [NewTokens(1, (97,))]

        def __getattr__(self, name):
            return getattr(self._scheduler, name)

        def schedule(self, now):
            if told:
                return self._scheduler.schedule(now)
            return StepPlan((Release(0),))

        def take_events(self):
            events, self._events = self._events, []
            return events

    def execute(plan):
        told.append(late._news.wait(HANG_S))
        return real(plan)

    late = PlainStream(loop)
    (opened,) = thread._door.enter((make_request(1),), late, 0.0)
    real, thread.driver.executor.execute = (
        thread.driver.executor.execute,
        execute,
    )

    def install():
        thread.driver.scheduler = Operations(thread.driver.scheduler)

    thread.call(install).result(HANG_S)
    thread.call(lambda: None).result(HANG_S)

    assert told[0]  # a later plan of the request may be there, too
    thread.call(lambda: thread._door.leave(opened)).result(HANG_S)


def test_work_that_cannot_be_planned_is_an_error_with_counts(loop, started):
    """
    Nobody waits for a step that will never be: all requests end, and the engine goes on.
    """
    executor = FakeExecutor(fake_limits(n_slots=2, n_cells=64))
    object.__setattr__(executor.limits, "n_batch", 0)  # no context is like that
    started(thread := make_thread(executor))
    streams = [PlainStream(loop) for _ in range(3)]

    for i, stream in enumerate(streams):
        thread.submit_all((make_request(i, n_prompt=8),), stream)
    errors = [stream.read_to_end()[-1].error for stream in streams]

    assert all(isinstance(error, EngineStalled) for error in errors)
    last = errors[-1]
    assert (last.n_slots, last.n_cells, last.n_cells_used) == (2, 64, 0)
    assert last.n_running >= 1
    assert thread.alive
    assert thread.call(lambda: set(executor.opened)).result(HANG_S) == set()
