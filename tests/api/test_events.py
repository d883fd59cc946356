"""The stream of what becomes of an engine and its requests."""

from threading import Event

import anyio
import pytest

from pyllama_raw import Engine, SamplingParams
from pyllama_raw.api.events import EngineEvent, EventsLost, RequestEvent, RequestState
from pyllama_raw.api.results import EngineState
from pyllama_raw.core.step import DecodeStatus
from pyllama_raw.errors import ClosedError, InvalidRequest
from pyllama_raw.results import Watcher
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.support.limits import LIMIT_S
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio
WAITING, RUNNING, PREEMPTED, ENDED = RequestState
SHORT = SamplingParams(max_tokens=4)


def told(events):
    """What it says, without times."""
    return [
        (event.request_id, event.state, event.why)
        if isinstance(event, RequestEvent)
        else event.state
        if isinstance(event, EngineEvent)
        else event
        for event in events
    ]


async def test_a_stream_tells_all_from_its_beginning_to_the_end_of_the_engine():
    """
    Each request comes, runs and ends; the engine's state is first and last.
    """
    with anyio.fail_after(LIMIT_S):
        async with fake_engine() as engine:
            await engine.complete("before", SHORT)
            async with engine.events() as events:
                await engine.complete("hello", SHORT, client="me")
                await engine.aclose()
                found = [event async for event in events]

    assert told(found) == [
        EngineState.READY,
        (2, WAITING, None),
        EngineState.RUNNING,
        (2, RUNNING, None),
        (2, ENDED, "length"),
        EngineState.READY,
        EngineState.CLOSING,
        EngineState.CLOSED,
    ]
    assert found[1].client == "me"
    times = [event.at_s for event in found[1:]]
    assert times == sorted(times)


async def test_who_loses_its_slot_is_told():
    """
    A request that makes room is preempted, and runs again later.
    """
    are_posted = Event()
    executor = FakeExecutor(
        fake_limits(),
        failures={3: DecodeStatus.NO_SPACE},
        on_step=lambda *_: are_posted.wait(LIMIT_S),
    )
    with anyio.fail_after(LIMIT_S):
        async with fake_engine(executor) as engine, engine.events() as events:
            async with (
                engine.generate("one", SHORT) as one,
                engine.generate("two", SHORT) as two,
            ):
                are_posted.set()
                await one.collect()
                await two.collect()
            await engine.aclose()
            found = told([event async for event in events])

    assert [event for event in found if event[0] == 2] == [
        (2, WAITING, None),
        (2, RUNNING, None),
        (2, PREEMPTED, None),
        (2, RUNNING, None),
        (2, ENDED, "length"),
    ]


async def test_a_slow_reader_loses_the_oldest_and_is_told():
    """
    The stream holds so many events; the number of those before them comes first.
    """
    with anyio.fail_after(LIMIT_S):
        async with fake_engine() as engine, engine.events(max_events=3) as events:
            await engine.complete("hello", SHORT)
            await engine.complete("hello", SHORT)
            await engine.aclose()
            found = [event async for event in events]

    assert told(found) == [
        EventsLost(10),
        EngineState.READY,
        EngineState.CLOSING,
        EngineState.CLOSED,
    ]


async def test_a_reader_is_woken():
    """
    A task that waits for an event gets it when it comes.
    """
    states = []

    async def read(events, has_begun):
        async for event in events:
            states.append(event.state)
            has_begun.set()

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            async with fake_engine() as engine, engine.events() as events:
                has_begun = anyio.Event()
                tasks.start_soon(read, events, has_begun)
                await has_begun.wait()
                await engine.complete("hello", SHORT)
                await engine.aclose()

    assert states == [
        EngineState.READY,
        *(WAITING, EngineState.RUNNING, RUNNING, ENDED, EngineState.READY),
        EngineState.CLOSING,
        EngineState.CLOSED,
    ]


async def test_an_engine_that_fails_says_so():
    """
    The last event is its state.
    """

    def fail(*_):
        raise RuntimeError("as told")

    executor = FakeExecutor(fake_limits(), on_step=fail)
    with anyio.fail_after(LIMIT_S):
        async with fake_engine(executor) as engine, engine.events() as events:
            async with engine.generate("hello"):
                *_, last = [event async for event in events]

    assert last.state is EngineState.ERROR


async def test_a_closed_engine_has_no_events():
    """
    The error comes when the block is entered; a wrong size at once.
    """
    async with fake_engine() as engine:
        pass

    with pytest.raises(ClosedError):
        async with engine.events():
            pass
    with pytest.raises(InvalidRequest, match="max_events"):
        engine.events(max_events=0)


def test_a_program_without_an_event_loop_reads_them():
    """
    The stream of a blocking engine is a `with` block and an iterator.
    """

    async def make():
        return fake_engine()

    with Engine(make) as engine, engine.events() as events:
        engine.complete("hello", SHORT)
        states = [next(events).state for _ in range(5)]

    assert states == [
        EngineState.READY,
        WAITING,
        EngineState.RUNNING,
        RUNNING,
        ENDED,
    ]


class Tokens(Watcher):
    """Counts the tokens of all steps."""

    def __init__(self):
        self.n_tokens = 0

    def stepped(self, step):
        self.n_tokens += step.n_prefill + step.n_decode


async def test_a_program_may_watch():
    """
    A watcher is told of each step until it is taken away.
    """
    watcher, params = Tokens(), SamplingParams(max_tokens=3)
    async with fake_engine() as engine:
        engine.watch(watcher)
        await engine.complete("hello", params)
        await engine.cache_stats()  # the step that told the end is over then
        n_watched = watcher.n_tokens
        engine.unwatch(watcher)
        await engine.complete("hello", params)

    assert (n_watched, watcher.n_tokens) == (6 + 2, 6 + 2)
