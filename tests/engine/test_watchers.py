"""Watchers that raise: nobody else suffers."""

from contextvars import ContextVar

import pytest

from pyllama_raw.core.request import FinishReason
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from tests.core.support import finished, make_request
from tests.engine.support import HANG_S, PlainStream, make_thread

HOOKS = ["came", "changed", "stepped", "ended", "engine"]
ONE = ["came", "running", "step", "ended", "step"]  # what is told of a request
RAISED = [
    ("ERROR", "pyllama_raw.engine.watcher", "Raising raised; it is told nothing more")
]


class Fault(BaseException):
    """Nothing that a handler of Exception sees."""


class Noting(Watcher):
    """Notes which hooks are called."""

    def __init__(self):
        self.told = []
        self.states = []

    def came(self, requests, submitted):
        self.told.append("came")

    def changed(self, change, request_id, now):
        self.told.append(change)

    def stepped(self, step):
        if self.told[-1:] != ["step"]:  # several are told as one
            self.told.append("step")

    def ended(self, request, end):
        self.told.append("ended")

    def engine(self, state, now):
        self.states.append(state)


class Raising(Noting):
    """Raises *error* when *hook* is called."""

    def __init__(self, hook, error):
        super().__init__()
        self._error = error
        self._note = {name: getattr(self, name) for name in HOOKS}[hook]
        setattr(self, hook, self._raise)

    def _raise(self, *arguments):
        self._note(*arguments)
        raise self._error


def lines(caplog):
    return [(r.levelname, r.name, r.getMessage()) for r in caplog.records]


@pytest.mark.parametrize("error", [ValueError, Fault, SystemExit])
@pytest.mark.parametrize(
    ("hook", "told"),
    [
        ("came", ["came"]),
        ("changed", ["came", "running"]),
        ("stepped", ["came", "running", "step"]),
        ("ended", ["came", "running", "step", "ended"]),
    ],
)
def test_a_driver_goes_on_without_a_watcher_that_raises(hook, told, error, caplog):
    """
    All requests end, another watcher is told of them, and the log says so once.
    """
    executor = FakeExecutor(fake_limits())
    raising, other, events = Raising(hook, error), Noting(), []
    driver = Driver(
        fake_parts(executor).scheduler,
        executor,
        lambda: 0.0,
        events.extend,
        watchers=(raising, other),
    )
    for request_id in range(2):
        driver.add([make_request(request_id)], 0.0)
        while driver.step():
            pass

    assert raising.told == told
    assert other.told == ONE * 2
    assert {i: end.reason for i, end in finished(events).items()} == dict.fromkeys(
        range(2), FinishReason.LENGTH
    )
    assert lines(caplog) == RAISED


def test_a_user_can_interrupt_a_watcher():
    """
    KeyboardInterrupt comes from the user, also while a watcher is told.
    """
    executor = FakeExecutor(fake_limits())
    driver = Driver(
        fake_parts(executor).scheduler,
        executor,
        lambda: 0.0,
        lambda *_: None,
        watchers=(Raising("came", KeyboardInterrupt),),
    )

    with pytest.raises(KeyboardInterrupt):
        driver.add([make_request()], 0.0)


@pytest.mark.parametrize("hook", HOOKS[:4])
def test_an_engine_goes_on_without_a_watcher_that_raises(hook, loop, started, caplog):
    """
    The request that was under way and the next one are done.
    """
    started(thread := make_thread())
    raising, other = Raising(hook, Fault), Noting()
    for watcher in (raising, other):
        thread.watch(watcher).result(HANG_S)
    ends = []
    for request_id in range(2):
        thread.submit_all((make_request(request_id),), stream := PlainStream(loop))
        ends.append(stream.read_to_end()[-1].reason)
    thread.call(lambda: None).result(HANG_S)

    assert ends == [FinishReason.LENGTH] * 2
    assert other.told == ONE * 2
    assert other.states == ["ready", *["running", "ready"] * 2]
    assert lines(caplog) == RAISED


def test_an_engine_ends_although_a_watcher_raises(caplog):
    """
    What it stands on is freed, and no error is left.
    """
    released = []
    thread = make_thread(release=lambda: released.append(True))
    raising = Raising("came", Fault)
    thread.watch(raising).result(HANG_S)
    raising.engine = raising.came  # not of the state that is told at once
    thread.close()

    assert thread.join(HANG_S)
    assert (released, thread.error) == ([True], None)
    assert lines(caplog) == RAISED


def test_a_watcher_that_raises_at_once_is_not_taken(loop, started):
    """
    Whoever wanted it gets the error; the engine serves.
    """
    started(thread := make_thread())
    with pytest.raises(Fault):
        thread.watch(Raising("engine", Fault)).result(HANG_S)
    thread.submit_all((make_request(),), stream := PlainStream(loop))

    assert stream.read_to_end()[-1].reason is FinishReason.LENGTH


CALLER = ContextVar("caller", default="nobody")


class Callers(Watcher):
    """Notes who is the caller when a request comes and when it ends."""

    def __init__(self):
        self.told = []

    def came(self, requests, submitted):
        self.told += [(request.request_id, CALLER.get()) for request in requests]

    def ended(self, request, end):
        self.told.append((request.request_id, end.request_id, CALLER.get()))


def test_a_watcher_knows_the_caller_when_a_request_ends(loop, started):
    """
    It is told in the context of the caller, with the request, both times.
    """
    started(thread := make_thread())
    thread.watch(callers := Callers()).result(HANG_S)
    for request_id, caller in enumerate(["a", "b"]):
        CALLER.set(caller)
        thread.submit_all((make_request(request_id),), stream := PlainStream(loop))
        stream.read_to_end()

    assert callers.told == [(0, "a"), (0, 0, "a"), (1, "b"), (1, 1, "b")]
