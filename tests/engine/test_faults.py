"""Exceptions in commands of the engine thread: who is told, and who goes on."""

from concurrent.futures import Future
from functools import partial

import pytest

from pyllama_raw.core.request import Finished, FinishReason
from pyllama_raw.core.step import Written
from pyllama_raw.engine import thread as module
from pyllama_raw.engine.mailbox import Errand, Refused
from pyllama_raw.errors import EngineFault, EngineStopped
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, HeldSteps, PlainStream, make_thread


class Fault(BaseException):
    """Nothing that a handler of Exception sees."""


FAULTS = [
    Fault,
    MemoryError,
    KeyError,
    AssertionError,
    SystemExit,
    KeyboardInterrupt,
    RecursionError,
    GeneratorExit,
]
N_BURST = 20


class Saboteur:
    """Wraps a function: the calls that *picks* wants raise, before or after it."""

    def __init__(self, function, picks, error, *, late=False):
        self._function, self._picks = function, picks
        self._error, self._late = error, late

    def __call__(self, *arguments):
        if not self._picks(*arguments):
            return self._function(*arguments)
        if self._late:
            self._function(*arguments)
        raise self._error


class Burst:
    """An engine whose step is held while commands are posted, which it takes at once."""

    def __init__(self, loop, started):
        self.loop = loop
        self.held = HeldSteps()
        self.executor = FakeExecutor(fake_limits(), on_step=self.held)
        self.thread = make_thread(self.executor)
        started(self.thread)
        self.first = self.submit(0, max_tokens=6)
        self.held.wait_for_one()

    @property
    def scheduler(self):
        return self.thread.driver.scheduler

    def submit(self, *request_ids, max_tokens=3):
        stream = PlainStream(self.loop)
        requests = tuple(make_request(i, max_tokens=max_tokens) for i in request_ids)
        self.thread.submit_all(requests, stream)
        return stream

    def report(self, report):
        self.thread._post(partial(self.scheduler.take_report, report))

    def go_on(self):
        self.held.allow(1000)

    def check_idle(self):
        """Nothing is left of anybody, and the engine serves."""
        assert self.submit(999).read_to_end()[-1].reason is FinishReason.LENGTH
        self.thread.call(self.scheduler.check_integrity).result(HANG_S)
        opened = self.thread.call(lambda: set(self.executor.opened))
        assert opened.result(HANG_S) == set()
        admission = self.thread._door._admission
        assert (admission.n_open, admission.n_tokens) == (0, 0)
        assert self.thread.records == {}
        assert self.thread.alive


@pytest.fixture
def burst(loop, started):
    return Burst(loop, started)


def error_at(position):
    return FAULTS[position % len(FAULTS)]("sabotage")


def refusal(stream):
    """The cause of the only event of a stream that was refused."""
    (event,) = stream.read_to_end()
    assert isinstance(event, Refused)
    assert isinstance(event.error, EngineFault)
    return event.error.__cause__


@pytest.mark.parametrize("position", range(N_BURST))
def test_a_sampler_that_cannot_be_opened_refuses_its_request(burst, position):
    """
    One of 20 requests taken together is refused, wherever it is; the others are served.
    """
    error, bad = error_at(position), position + 1
    burst.executor.open = Saboteur(
        burst.executor.open, lambda request: request.request_id == bad, error
    )

    streams = {i: burst.submit(i) for i in range(1, N_BURST + 1)}
    burst.go_on()

    assert refusal(streams.pop(bad)) is error
    for stream in [burst.first, *streams.values()]:
        assert stream.read_to_end()[-1].reason is FinishReason.LENGTH
    burst.check_idle()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("position", range(0, N_BURST, 3))
def test_a_queue_that_raises_refuses_all_outputs_of_a_prompt(burst, position, late):
    """
    Every sampler of the group is closed again, also if the scheduler had taken it.
    """
    error, bad = error_at(position), 100 * (position + 1)
    burst.scheduler.add_all = Saboteur(
        burst.scheduler.add_all,
        lambda requests, now: requests[0].request_id == bad,
        error,
        late=late,
    )

    ids = [(100 * i, 100 * i + 1) for i in range(1, N_BURST + 1)]
    streams = {group[0]: burst.submit(*group) for group in ids}
    burst.go_on()

    assert refusal(streams.pop(bad)) is error
    for stream in [burst.first, *streams.values()]:
        assert stream.read_to_end()[-1].reason is FinishReason.LENGTH
    burst.check_idle()


@pytest.mark.parametrize("position", range(N_BURST))
def test_a_call_that_raises_is_answered(burst, position):
    """
    Whatever it raises is the caller's; calls and requests around it are served.
    """
    error = error_at(position)

    def sabotage():
        raise error

    answers, streams = [], []
    for i in range(N_BURST):
        function = sabotage if i == position else (lambda i=i: i)
        answers.append(burst.thread.call(function))
        streams.append(burst.submit(i + 1))
    burst.go_on()

    assert answers.pop(position).exception(HANG_S) is error
    values = [answer.result(HANG_S) for answer in answers]
    assert values == [i for i in range(N_BURST) if i != position]
    for stream in [burst.first, *streams]:
        assert stream.read_to_end()[-1].reason is FinishReason.LENGTH
    burst.check_idle()


def test_a_call_whose_caller_has_left_is_not_made(burst):
    """
    A future that was cancelled takes no answer; the engine goes on.
    """
    made = []
    answer = burst.thread.call(lambda: made.append(1))
    assert answer.cancel()
    burst.go_on()
    burst.first.read_to_end()

    burst.check_idle()
    assert made == []


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("position", range(0, N_BURST, 3))
def test_a_cancellation_that_raises_ends_its_request_only(burst, position, late):
    """
    Its reader is told, the others are cancelled as they wished.
    """
    error, bad = error_at(position), position + 1
    burst.scheduler.cancel = Saboteur(
        burst.scheduler.cancel,
        lambda request_id, *_: request_id == bad,
        error,
        late=late,
    )

    streams = {i: burst.submit(i) for i in range(1, N_BURST + 1)}
    for i in streams:
        burst.thread.cancel(i)
    burst.go_on()

    assert refusal(streams.pop(bad)) is error
    for stream in streams.values():
        assert stream.read_to_end()[-1].reason is FinishReason.CANCELLED
    assert burst.first.read_to_end()[-1].reason is FinishReason.LENGTH
    burst.check_idle()


@pytest.mark.parametrize("position", range(0, N_BURST, 3))
def test_a_report_of_a_file_that_raises_is_only_logged(burst, position, caplog):
    """
    What a writer reports concerns no request: all are served, and the log has it.
    """
    error = error_at(position)
    burst.scheduler.take_report = Saboteur(
        lambda *_: None, lambda report: report.save_id == position, error
    )

    streams = []
    for i in range(N_BURST):
        burst.report(Written(i, None))
        streams.append(burst.submit(i + 1))
    burst.go_on()

    for stream in [burst.first, *streams]:
        assert stream.read_to_end()[-1].reason is FinishReason.LENGTH
    burst.check_idle()
    assert [record.exc_info[1] for record in caplog.records] == [error]


@pytest.mark.parametrize("position", range(N_BURST))
def test_a_death_at_a_command_answers_all_that_was_taken(
    loop, started, monkeypatch, position
):
    """
    If the thread ends at any of 20 commands, all 20 are answered, and later ones told why.
    """
    burst, death = Burst(loop, started), Fault("death")

    def die(command):
        if command is doomed:
            raise death
        return obey(command)

    thread = burst.thread
    obey = thread._obey
    streams = [PlainStream(loop) for _ in range(N_BURST // 4)]
    answers = [Future() for _ in streams]
    commands = []
    for i, (stream, answer) in enumerate(zip(streams, answers, strict=True)):
        commands += [
            partial(
                thread._submit,
                thread._door.enter((make_request(i + 1),), stream, 0.0),
            ),
            Errand(lambda: None, answer),
            partial(thread._cancel, i),
            partial(burst.scheduler.take_report, Written(i, None)),
        ]
    doomed = commands[position]
    for command in commands:
        burst.thread._mailbox.post(command)
    burst.scheduler.take_report = lambda *_: None
    monkeypatch.setattr(thread, "_obey", die)
    burst.go_on()

    ends = [stream.read_to_end()[-1] for stream in streams]
    refused = {end.error for end in ends if isinstance(end, Refused)}
    failed = {answer.exception(HANG_S) for answer in answers} - {None}
    assert len(refused) >= len(streams) - position // 4
    assert len(failed) >= len(answers) - (position + 3) // 4
    for error in refused | failed:
        assert isinstance(error, EngineStopped)
        assert error.__cause__ is death
    with pytest.raises(EngineStopped) as caught:
        burst.submit(77)
    assert caught.value.__cause__ is death


def test_a_log_that_raises_ends_the_thread_and_nobody_hangs(burst, monkeypatch):
    """
    Where even the handler of a fault fails, every reader is told.
    """
    death = MemoryError("nothing is left")

    class Log:
        def exception(self, *_):
            raise death

    monkeypatch.setattr(module, "_log", Log())
    burst.scheduler.take_report = Saboteur(None, lambda *_: True, KeyError())
    burst.report(Written(1, None))
    streams = [burst.submit(i) for i in range(1, N_BURST)]
    burst.go_on()

    for stream in [burst.first, *streams]:
        end = stream.read_to_end()[-1]
        assert not isinstance(end, Finished)
        assert end.error.__cause__ is death


def test_a_loop_that_cannot_be_woken_harms_no_other(loop, started):
    """
    Whatever an event loop raises, its requests are given up and others are served.
    """

    class Broken:
        def call_soon_threadsafe(self, *_):
            raise MemoryError

    executor = FakeExecutor(fake_limits(n_ctx_slot=10**6, n_cells=10**7))
    started(thread := make_thread(executor))
    orphan, stream = PlainStream(Broken()), PlainStream(loop)
    thread.submit_all((make_request(0, max_tokens=10**6),), orphan)
    thread.submit_all((make_request(1, max_tokens=20),), stream)

    assert stream.read_to_end()[-1].n_output == 20
    while thread.call(lambda: bool(executor.opened)).result(HANG_S):
        pass  # the orphan would run for minutes
    assert orphan.events[-1].reason is FinishReason.CANCELLED
