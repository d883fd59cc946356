"""Requests wait outside the scheduler until all their rows are there, and end there, too."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from threading import Event
from time import monotonic

import pytest

from pyllama_raw.core.encodes import Encodes, RowKey, RowNeed
from pyllama_raw.core.request import Finished, FinishReason, Span
from pyllama_raw.engine.mailbox import Refused
from pyllama_raw.engine.media_desk import Encoder
from pyllama_raw.engine.requests import RequestEncodes
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import BadMedia, PromptTooLong
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from tests.core.support import make_request
from tests.engine.support import HANG_S, PlainStream

N_FLOATS = 4


class Control:
    def __init__(self, task: FakeTask) -> None:
        self._task, self.cancelled = task, False

    def cancel(self) -> None:
        self.cancelled = True
        self._task.may_end.set()


@dataclass(eq=False)
class FakeTask:
    """An encode that ends when the test allows it, or is cancelled."""

    name: str = "a"
    error: Exception | None = None
    begun: Event = field(default_factory=Event)
    may_end: Event = field(default_factory=Event)

    @property
    def need(self) -> RowNeed:
        return RowNeed(RowKey(self.name.encode()), 4 * N_FLOATS)

    def control(self) -> Control:
        return Control(self)

    def encode(self, control: Control) -> array | None:
        self.begun.set()
        assert self.may_end.wait(HANG_S)
        if self.error is not None:
            raise self.error
        return None if control.cancelled else array("f", [0.0] * N_FLOATS)


class FakeDesk:
    """Stands for a MediaDesk: the payloads of its requests are tasks."""

    def __init__(self) -> None:
        self.encoder = Encoder(Encodes(10**6, 10**6))

    def enter(self, opened) -> None:
        shown = [each for each in opened if each.request.payloads]
        for each in shown:
            request = each.request
            each.encodes = RequestEncodes(request.request_id, request.payloads)
        self.encoder.enter([each.encodes for each in shown])


class Told(Watcher):
    """Ids, in the order in which they came and ended."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int]] = []

    def came(self, requests, submitted) -> None:
        self.all += [("came", request.request_id) for request in requests]

    def ended(self, request, end) -> None:
        self.all.append(("ended", end.request_id))


class House:
    """An engine of one slot with a fake desk; without a *clock* the test sets the time."""

    def __init__(self, loop, started, clock=None) -> None:
        self.loop, self.now = loop, 0.0
        self.desk, self.told = FakeDesk(), Told()
        self.executor = FakeExecutor(fake_limits(n_slots=1))
        parts = replace(fake_parts(self.executor), media=self.desk)
        self.thread = EngineThread(parts, clock=clock or (lambda: self.now))
        started(self.thread)
        self.thread.watch(self.told).result(HANG_S)

    def submit(self, ids, *tasks: FakeTask, **fields) -> PlainStream:
        """Requests whose prompts show *tasks*, an image of three rows each."""
        spans = tuple(Span(3 * i, 3 * i + 3, 1) for i in range(len(tasks)))
        tokens = array("i", [-1] * (3 * len(tasks)) + [7, 8, 9])
        made = [
            replace(
                make_request(i, **fields), tokens=tokens, spans=spans, payloads=tasks
            )
            for i in ids
        ]
        stream = PlainStream(self.loop)
        self.thread.submit_all(tuple(made), stream)
        return stream

    def serve(self, request_id: int) -> None:
        """Have a request of text served, with all that was posted before it."""
        end = self.submit([request_id]).read_to_end()[-1]
        assert end.reason is FinishReason.LENGTH

    def check_empty(self) -> None:
        """Nothing of any request is left."""
        self.serve(999)
        thread, scheduler = self.thread, self.thread.driver.scheduler
        thread.call(scheduler.check_integrity).result(HANG_S)
        assert thread.call(lambda: set(self.executor.opened)).result(HANG_S) == set()
        assert thread._room.waiting == []
        assert self.desk.encoder.stats.media_bytes == 0
        assert thread.records.oldest is None


def ends_of(stream: PlainStream, n: int) -> list[Finished]:
    """The ends of the *n* requests of a stream."""
    ends: list[Finished] = []
    while len(ends) < n:
        ends += [each for each in stream.read_to_end() if isinstance(each, Finished)]
    return ends


@pytest.fixture
def house(loop, started):
    made = House(loop, started)
    yield made
    made.desk.encoder.close()


def test_a_request_starts_when_its_rows_are_there(house):
    """
    Meanwhile it counts as waiting, holds no slot, and others are served.
    """
    task = FakeTask()
    stream = house.submit([0], task)
    house.serve(1)
    before = house.thread.stats

    task.may_end.set()
    end = stream.read_to_end()[-1]

    assert (before.submitted, before.waiting, before.waiting_tokens) == (2, 1, 6)
    assert (before.running, before.swapped) == (0, 0)
    assert end.reason is FinishReason.LENGTH
    assert end.encode_s is not None
    assert house.told.all == [("came", 0), ("came", 1), ("ended", 1), ("ended", 0)]
    house.check_empty()


def test_rows_that_are_kept_are_not_waited_for(house):
    """
    A later request with the same image starts at once.
    """
    task = FakeTask()
    task.may_end.set()
    ends = [house.submit([i], task).read_to_end()[-1] for i in range(2)]

    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 2
    assert house.desk.encoder.stats.encodes == 1
    house.check_empty()


def test_all_images_of_a_prompt_are_waited_for(house):
    """
    Also by each of its outputs, which share the encodes.
    """
    first, second = FakeTask("a"), FakeTask("b")
    stream = house.submit([0, 1], first, second)
    first.may_end.set()
    assert second.begun.wait(HANG_S)
    house.serve(2)
    n_waiting = house.thread.stats.waiting

    second.may_end.set()
    ends = ends_of(stream, 2)

    assert n_waiting == 2
    assert {end.request_id for end in ends} == {0, 1}
    assert house.desk.encoder.stats.encodes == 2
    house.check_empty()


def cancel(house: House) -> None:
    house.thread.cancel(0)


def reach_deadline(house: House) -> None:
    house.now = 5.0
    house.serve(1)  # the clock has no alarm


@pytest.mark.parametrize(
    ("act", "reason"),
    [(cancel, FinishReason.CANCELLED), (reach_deadline, FinishReason.DEADLINE)],
)
def test_a_request_can_end_while_it_waits_for_rows(house, act, reason):
    """
    Its encode is cancelled, and nothing of it is left.
    """
    stream = house.submit([0], FakeTask(), deadline=5.0)

    act(house)
    end = stream.read_to_end()[-1]

    assert (end.reason, end.n_output, end.timings.admitted) == (reason, 0, None)
    house.check_empty()
    assert house.thread.stats.finished[reason] == 1
    assert house.desk.encoder.stats.encodes == 0


def test_an_idle_engine_wakes_at_the_deadline_of_a_request_that_waits_for_rows(
    loop, started
):
    """
    Nothing else has to happen.
    """
    house = House(loop, started, monotonic)

    stream = house.submit([0], FakeTask(), deadline=monotonic() + 0.02)
    end = stream.read_to_end()[-1]

    assert end.reason is FinishReason.DEADLINE
    house.desk.encoder.close()


def test_a_failed_encode_ends_its_requests(house):
    """
    Each output raises it; nothing of them is computed.
    """
    task = FakeTask(error=BadMedia("it is damaged"))
    stream = house.submit([0, 1], task)
    task.may_end.set()

    ends = ends_of(stream, 2)

    assert [(type(end.error), end.error.index) for end in ends] == [(BadMedia, 0)] * 2
    assert house.executor.plans == []
    house.check_empty()
    assert house.thread.stats.failed == 2


@pytest.mark.parametrize("drains", [True, False])
def test_closing_an_engine_whose_requests_wait_for_rows(house, drains):
    """
    A drain waits for them; else they end as closed.
    """
    task = FakeTask()
    stream = house.submit([0], task)
    house.serve(1)

    house.thread.close(drains=drains)
    if drains:
        task.may_end.set()
    end = stream.read_to_end()[-1]

    assert end.reason is (FinishReason.LENGTH if drains else FinishReason.CLOSED)
    assert house.thread.join(HANG_S)


def test_nothing_is_encoded_for_a_prompt_that_fits_no_slot(house):
    """
    It is refused before, and holds nothing.
    """
    tasks = [FakeTask(str(i)) for i in range(house.executor.limits.n_ctx_slot // 3)]

    with pytest.raises(PromptTooLong):
        house.submit([0], *tasks)

    assert not any(task.begun.is_set() for task in tasks)
    house.check_empty()


def test_a_request_that_the_scheduler_does_not_take_is_refused(house):
    """
    Also when its rows are there; its other outputs are, too, and the engine goes on.
    """
    task = FakeTask()
    stream = house.submit([0, 1], task)
    house.serve(2)
    scheduler = house.thread.driver.scheduler
    add_all = scheduler.add_all

    def fail(requests, now):
        if requests[0].request_id == 1:
            raise MemoryError
        add_all(requests, now)

    scheduler.add_all = fail
    task.may_end.set()

    assert isinstance(stream.read_to_end()[-1], Refused)
    house.check_empty()
