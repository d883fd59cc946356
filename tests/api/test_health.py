"""Health of an engine: whether it makes progress."""

import pytest

from pyllama_raw.api.facts import Health, HealthState, health
from pyllama_raw.api.results import EngineState
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, HeldSteps, PlainLoop, PlainStream, make_thread


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_that_takes_no_step_is_stalled():
    """
    With work, and only then; who waits for a slot is told by the wait.
    """
    clock, steps = Clock(), HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=steps)
    thread = make_thread(executor, clock=clock)
    streams = [PlainStream(PlainLoop()) for _ in range(2)]

    def look(state=EngineState.RUNNING):
        return health(thread, state, 5.0)

    clock.now = 150.0
    assert look().state in (HealthState.STARTING, HealthState.READY)
    thread.submit_all((make_request(0, max_tokens=1),), streams[0])
    steps.wait_for_one()
    clock.now = 152.0
    thread.submit_all((make_request(1, max_tokens=1),), streams[1])
    clock.now = 154.0
    first = look()
    clock.now = 156.0
    stalled = look()
    closing = look(EngineState.CLOSING)
    steps.allow()
    steps.wait_for_one()
    going = look()
    steps.allow(9)
    streams[1].read_to_end()
    clock.now = 1000.0
    idle = look()
    thread.close()
    assert thread.join(HANG_S)

    assert first == Health(HealthState.READY, None, 154.0, 2.0, None, 4.0)
    assert stalled == Health(HealthState.STALLED, None, 156.0, 4.0, None, 6.0)
    assert closing.state is HealthState.STALLED
    assert going == Health(HealthState.READY, 156.0, 156.0, 0.0, None, 0.0)
    assert idle == Health(HealthState.READY, 156.0, 1000.0, 0.0, None, 0.0)
    assert look(EngineState.CLOSING).state is HealthState.DRAINING
    assert look(EngineState.ERROR).state is HealthState.DEAD


@pytest.mark.anyio
async def test_health_of_an_engine():
    """
    An open engine is ready, a closed one dead; none waits for an answer.
    """
    async with fake_engine() as engine:
        await engine.complete("hello")
        ready = engine.health()
    dead = engine.health()

    assert (ready.state, ready.is_ready) == (HealthState.READY, True)
    assert (dead.state, dead.is_ready) == (HealthState.DEAD, False)
    assert dead.last_step_at == ready.last_step_at is not None
