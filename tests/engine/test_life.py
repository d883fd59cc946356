"""The life of an engine thread on fakes: its table, its sleep, and what comes after failures."""

import time
from dataclasses import replace

import pytest

from pyllama_raw.core.request import FinishReason
from pyllama_raw.engine.info import EngineState
from pyllama_raw.engine.life import (
    RETRY_S,
    TABLE,
    WINDOW_S,
    Life,
    LifeEvent,
    Phase,
    Restarts,
)
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import ContextFailed, EngineStopped, WrongUse
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from tests.core.support import make_request
from tests.engine.support import HANG_S, HeldSteps, PlainLoop, PlainStream


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class States(Watcher):
    """The states of an engine as they were told."""

    def __init__(self) -> None:
        self.all: list[EngineState] = []

    def engine(self, state: EngineState, now: float) -> None:
        self.all.append(state)


class Failing(FakeExecutor):
    """Raises in the steps that are named, and in the first rebuilds."""

    def __init__(self, steps=(), n_rebuilds=0, **options) -> None:
        super().__init__(fake_limits(), on_step=self._fail, **options)
        self._steps = set(steps)
        self._n_failing = n_rebuilds
        self.n_rebuilds = 0

    def _fail(self, step, plan) -> None:
        if step in self._steps:
            raise MemoryError("as told")

    def rebuild(self) -> None:
        self.n_rebuilds += 1
        if self.n_rebuilds <= self._n_failing:
            raise ContextFailed("as told", None, "no memory")
        super().rebuild()


def start(executor, max_restarts=0, clock=time.monotonic) -> EngineThread:
    return EngineThread(
        replace(fake_parts(executor), restarts=Restarts(max_restarts)), clock=clock
    )


def submit(thread, *, n_tokens=8, **fields) -> PlainStream:
    stream = PlainStream(PlainLoop())
    thread.submit_all((make_request(1, max_tokens=n_tokens, **fields),), stream)
    return stream


def tokens_of(events) -> list[int]:
    return [token for event in events[:-1] for token in event.tokens]


def end(thread) -> None:
    thread.close()
    assert thread.join(HANG_S)


def outcome(executor, max_restarts=0, **fields):
    """The events of one request, and what the engine told."""
    thread, states = start(executor, max_restarts), States()
    thread.watch(states)
    events = submit(thread, **fields).read_to_end()
    end(thread)
    return events, states.all


# The verbs that bring a life from its beginning to each phase.
WAYS = {
    Phase.AWAKE: (),
    Phase.LOST: (LifeEvent.LOSE,),
    Phase.ASLEEP: (LifeEvent.SLEEP,),
    Phase.DRAINING: (LifeEvent.DRAIN,),
    Phase.DRAINING_LOST: (LifeEvent.DRAIN, LifeEvent.LOSE),
    Phase.ENDING: (LifeEvent.CLOSE,),
    Phase.ENDING_LOST: (LifeEvent.SLEEP, LifeEvent.CLOSE),
    Phase.CLOSED: (LifeEvent.CLOSE, LifeEvent.END),
    Phase.FAILED: (LifeEvent.FAIL,),
}


class Lived:
    """A life on a fake executor, and its verbs by the events that they are."""

    def __init__(self, *events: LifeEvent) -> None:
        self.clock, self.executor = Clock(), FakeExecutor(fake_limits())
        scheduler = fake_parts(self.executor).scheduler
        life = Life(self.executor, scheduler, Restarts(9), self.clock)
        error = MemoryError("as told")
        self.life = life
        self._verbs = {
            LifeEvent.SLEEP: life.sleep,
            LifeEvent.WAKE: life.wake,
            LifeEvent.WARM_UP: life.warm_up,
            LifeEvent.REBUILD: lambda: life.rebuild("as told"),
            LifeEvent.LOSE: lambda: life.survive(error),
            LifeEvent.RENEW: life.come_back,
            LifeEvent.DRAIN: lambda: life.close(drains=True),
            LifeEvent.DRAINED: life.drained,
            LifeEvent.CLOSE: lambda: life.close(drains=False),
            LifeEvent.END: life.end,
            LifeEvent.FAIL: lambda: life.fail(error),
        }
        for event in events:
            self.do(event)

    def do(self, event: LifeEvent) -> None:
        self.clock.now += RETRY_S
        self._verbs[event]()


@pytest.mark.parametrize("phase", Phase)
def test_verbs_do_what_the_table_says(phase):
    """
    Every cell: the next phase, or a refusal that changes nothing. Steps have a context.
    """
    for event, cell in TABLE[phase].items():
        lived = Lived(*WAYS[phase])
        assert lived.life.phase is phase

        if isinstance(cell, str):
            with pytest.raises(WrongUse, match=cell[:20]):
                lived.do(event)
        else:
            lived.do(event)

        after = phase if isinstance(cell, str) else cell
        assert (event, lived.life.phase) == (event, after)
        assert not (after.has_context and lived.executor.is_suspended)


def test_every_life_can_end_and_no_end_is_left():
    """
    close() leads to an end from each phase; ends lead to ends.
    """
    ends = {Phase.CLOSED, Phase.FAILED}

    for phase in set(Phase) - ends:
        lived = Lived(*WAYS[phase], LifeEvent.CLOSE, LifeEvent.END)
        assert lived.life.phase is Phase.CLOSED
    assert {cell for phase in ends for cell in TABLE[phase].values()} == {Phase.FAILED}
    assert set(TABLE) == set(Phase)


def test_requests_go_on_after_failures_of_the_executor(caplog):
    """
    Three in a minute are survived with the tokens of an undisturbed run; each is in the log.
    """
    undisturbed, _ = outcome(Failing())
    caplog.clear()
    disturbed, states = outcome(Failing({2, 5, 8}), max_restarts=3)

    assert tokens_of(disturbed) == tokens_of(undisturbed)
    assert disturbed[-1].reason is undisturbed[-1].reason is FinishReason.LENGTH
    told = [each.message.split(":")[0] for each in caplog.records]
    assert told == [
        f"the engine failed, restart {i} of at most 3 in 60 s" for i in (1, 2, 3)
    ]
    assert states.count(EngineState.LOADING) == 3
    assert states[-1] is EngineState.CLOSED


@pytest.mark.parametrize(("n_failures", "max_restarts"), [(1, 0), (4, 3)])
def test_one_failure_too_many_ends_the_engine(n_failures, max_restarts):
    """
    Requests end with a typed error, whose cause is the failure.
    """
    executor = Failing({3 * (i + 1) for i in range(n_failures)})
    events, states = outcome(executor, max_restarts, n_tokens=40)

    error = events[-1].error
    assert type(error) is EngineStopped
    assert type(error.__cause__) is MemoryError
    assert states[-1] is EngineState.ERROR


def test_failures_that_are_old_do_not_count():
    """
    A minute later the engine may fail as often again.
    """
    clock = Clock()
    executor = Failing({1, 12})
    thread = start(executor, 1, clock)
    first = submit(thread).read_to_end()
    clock.now += WINDOW_S
    second = submit(thread).read_to_end()
    end(thread)

    assert first[-1].reason is second[-1].reason is FinishReason.LENGTH
    assert executor.n_rebuilds == 2


def test_a_context_that_cannot_be_made_is_tried_again():
    """
    Each try is a failure; meanwhile requests come, and end by their deadlines.
    """
    clock, states = Clock(), States()
    executor = Failing({1}, n_rebuilds=1)
    thread = start(executor, 2, clock)
    thread.watch(states).result(HANG_S)
    stream = submit(thread)
    while EngineState.LOADING not in states.all:
        thread.call(lambda: None).result(HANG_S)
    clock.now += 1.5
    late = PlainStream(PlainLoop())
    request = make_request(2, max_tokens=4, deadline=clock.now - 1.0)
    thread.submit_all((request,), late)
    late_end = late.read_to_end()[-1]
    clock.now += 5.0
    thread.call(lambda: None)
    end_of_first = stream.read_to_end()[-1]
    end(thread)

    assert late_end.reason is FinishReason.DEADLINE
    assert end_of_first.reason is FinishReason.LENGTH
    assert executor.n_rebuilds == 2


def test_a_failure_of_the_scheduler_ends_the_engine():
    """
    What it knows of requests may be wrong then, so none goes on.
    """
    thread = start(Failing(), 3)
    cause = RuntimeError("as told")

    def fail(*_):
        raise cause

    thread.driver.scheduler.apply = fail
    events = submit(thread).read_to_end()
    assert thread.join(HANG_S)

    assert (thread.error, type(events[-1].error)) == (cause, EngineStopped)


def test_nothing_is_computed_while_it_sleeps():
    """
    Requests come, are cancelled and end by their deadlines; the rest is done afterwards.
    """
    clock = Clock()
    executor = FakeExecutor(fake_limits())
    thread = start(executor, clock=clock)
    thread.call(thread.life.sleep).result(HANG_S)
    n_before, streams = executor.n_steps, []
    for i, deadline in enumerate((None, clock.now + 1.0, None)):
        streams.append(PlainStream(PlainLoop()))
        request = make_request(i, max_tokens=2, deadline=deadline)
        thread.submit_all((request,), streams[i])
    thread.cancel(2)
    cancelled = streams[2].read_to_end()[-1]
    clock.now += 2.0
    thread.call(lambda: None).result(HANG_S)
    late = streams[1].read_to_end()[-1]
    n_asleep, state = executor.n_steps, thread.state
    thread.call(thread.life.sleep).result(HANG_S)
    thread.call(thread.life.wake).result(HANG_S)
    first = streams[0].read_to_end()[-1]
    end(thread)

    assert (cancelled.reason, late.reason) == (
        FinishReason.CANCELLED,
        FinishReason.DEADLINE,
    )
    assert (n_asleep, state) == (n_before, EngineState.SLEEPING)
    assert first.reason is FinishReason.LENGTH


def test_who_drains_an_engine_that_sleeps_does_not_wait():
    """
    No step could end the requests, so they end as closed.
    """
    thread = start(FakeExecutor(fake_limits()))
    thread.call(thread.life.sleep).result(HANG_S)
    stream = submit(thread)
    thread.close(drains=True)
    assert thread.join(HANG_S)

    assert stream.read_to_end()[-1].reason is FinishReason.CLOSED


def test_a_context_is_made_anew_between_two_steps():
    """
    What runs is computed again and gives the same tokens; without a context nothing can be done.
    """
    undisturbed, _ = outcome(FakeExecutor(fake_limits()))
    steps = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=steps)
    thread = start(executor)
    stream = submit(thread)
    for _ in range(3):
        steps.wait_for_one()
        steps.allow()
    steps.wait_for_one()
    thread.call(lambda: thread.life.rebuild("as told"))
    steps.allow(20)
    events = stream.read_to_end()
    n_rebuilds = thread.stats.rebuilds
    thread.call(thread.life.warm_up).result(HANG_S)
    thread.call(thread.life.sleep).result(HANG_S)
    for verb in (lambda: thread.life.rebuild("as told"), thread.life.warm_up):
        with pytest.raises(WrongUse, match="sleep"):
            thread.call(verb).result(HANG_S)
    end(thread)

    assert tokens_of(events) == tokens_of(undisturbed)
    assert (n_rebuilds, executor.n_warm_ups) == (1, 1)
