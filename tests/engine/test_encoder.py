"""The encoder runs the tasks of requests in turn, once each, and drops what nobody wants."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from threading import Event
from time import monotonic

import pytest

from pyllama_raw.core.encodes import Encodes, RowNeed
from pyllama_raw.engine.media_desk import Encoder
from pyllama_raw.engine.requests import RequestEncodes
from pyllama_raw.errors import BadMedia, EngineFault, QueueFull
from tests.engine.support import HANG_S

N_BYTES = 40


class FakeControl:
    def __init__(self) -> None:
        self.cancelled = Event()

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeTask:
    """Gives rows of its letter; a held one waits until it is cancelled."""

    name: str
    log: list[str] = field(default_factory=list)
    error: Exception | None = None
    is_held: bool = False
    has_control: bool = True
    begun: Event = field(default_factory=Event)

    @property
    def need(self) -> RowNeed:
        return RowNeed(self.name.encode(), N_BYTES)

    def control(self) -> FakeControl:
        if not self.has_control:
            raise MemoryError
        return FakeControl()

    def encode(self, control: FakeControl) -> array | None:
        self.log.append(self.name)
        self.begun.set()
        if self.is_held:
            assert control.cancelled.wait(HANG_S)
            return None
        if self.error is not None:
            raise self.error
        return rows(self.name)


def rows(name: str) -> array:
    return array("f", [float(ord(name))] * (N_BYTES // 4))


def of(request_id: int, *tasks: FakeTask) -> RequestEncodes:
    return RequestEncodes(request_id, tasks)


class News:
    """Waits for what the encoder reports."""

    def __init__(self) -> None:
        self._told = Event()

    def __call__(self, _: int) -> None:
        self._told.set()

    def wait_until(self, holds) -> None:
        end = monotonic() + HANG_S
        while not holds():
            assert monotonic() < end
            self._told.wait(0.01)
            self._told.clear()


@pytest.fixture
def news():
    return News()


@pytest.fixture
def encoder(news):
    made = Encoder(Encodes(10 * N_BYTES, 3 * N_BYTES), news)
    yield made
    made.close()


def test_a_task_of_several_requests_runs_once(encoder, news):
    """
    Both are told, and their rows are the same ones.
    """
    log: list[str] = []
    tasks = [FakeTask(name, log) for name in "aab"]
    first, second = of(1, *tasks[:2]), of(2, *tasks[1:])
    encoder.enter([first, second])
    news.wait_until(lambda: encoder.is_done(second))

    assert encoder.is_done(first)
    assert log == ["a", "b"]
    assert encoder.rows(tasks[0]) is encoder.rows(tasks[1])
    assert encoder.rows(tasks[2]) == rows("b")
    assert (encoder.stats.encodes, encoder.stats.encodes_shared) == (2, 1)


def test_a_task_that_cannot_begin_hangs_nobody(encoder, news):
    """
    Its request is told, and others go on.
    """
    failing, good = of(1, FakeTask("x", has_control=False)), of(2, FakeTask("b"))

    encoder.enter([failing, good])
    news.wait_until(lambda: encoder.is_done(good))

    assert isinstance(failing.error, EngineFault)
    assert encoder.stats.encodes_failed == 1


@pytest.mark.parametrize(
    ("raised", "kind"), [(BadMedia("damaged"), BadMedia), (OSError(), EngineFault)]
)
def test_a_task_that_fails_fails_those_who_want_it(encoder, news, raised, kind):
    """
    Each has an error of its own, which holds no frame of the encode; others go on, and a
    later request tries again.
    """
    log: list[str] = []
    bad = FakeTask("x", log, error=raised)
    failing, good = (
        [of(1, FakeTask("a", log), bad), of(2, bad)],
        of(3, FakeTask("b", log)),
    )
    encoder.enter([*failing, good])
    news.wait_until(lambda: encoder.is_done(good))
    news.wait_until(lambda: all(each.error for each in failing))

    errors = [each.error for each in failing]
    for each in (*failing, good):
        encoder.leave(each)
    later = of(4, FakeTask("x", log))
    encoder.enter([later])
    news.wait_until(lambda: encoder.is_done(later))

    assert [type(error) for error in errors] == [kind, kind]
    assert errors[0] is not errors[1]
    assert not any(
        (e.__traceback__, e.__cause__, e.__context__) != (None,) * 3 for e in errors
    )
    assert sorted(log) == ["a", "b", "x", "x"]
    assert encoder.stats.encodes_failed == 1


def test_an_encode_that_nobody_wants_is_cancelled(encoder, news):
    """
    The next one begins, and nothing is held any more.
    """
    held = FakeTask("a", is_held=True)
    unwanted, wanted = [of(1, held), of(2, held)], of(3, FakeTask("b"))
    encoder.enter(unwanted)
    assert held.begun.wait(HANG_S)

    for each in unwanted:
        encoder.leave(each)
    encoder.enter([wanted])
    news.wait_until(lambda: encoder.is_done(wanted))
    encoder.leave(wanted)
    encoder.leave(wanted)

    stats = encoder.stats
    assert (stats.encodes, stats.encodes_cancelled) == (1, 1)
    assert (stats.media_bytes, stats.row_bytes) == (0, N_BYTES)


def test_requests_enter_together_or_not_at_all(encoder):
    """
    If there is too much, none of them holds anything.
    """
    letters = [FakeTask(name, is_held=True) for name in "abcdefghijk"]

    with pytest.raises(QueueFull):
        encoder.enter([of(1, *letters[:6]), of(2, *letters[6:])])

    assert encoder.stats.media_bytes == 0


def test_closing_ends_the_encode_that_runs():
    """
    It does not wait for more of it, and nothing else begins.
    """
    encoder = Encoder(Encodes(10 * N_BYTES, 0))
    held, other = FakeTask("a", is_held=True), FakeTask("b")
    encoder.enter([of(1, held), of(2, other)])
    assert held.begun.wait(HANG_S)

    encoder.close()

    assert not other.begun.is_set()
