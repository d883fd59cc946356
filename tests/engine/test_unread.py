"""Outputs that have no end, and nobody who reads them."""

import pytest

from pyllama_raw.core.request import Finished, NewTokens
from pyllama_raw.engine import thread as engine_thread
from pyllama_raw.errors import OutputUnread
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, PlainStream, make_thread

ENDLESS = 2**31 - 1


@pytest.fixture(autouse=True)
def _no_margin(monkeypatch: pytest.MonkeyPatch):
    """Slots alone decide how much may be unread."""
    monkeypatch.setattr(engine_thread, "MAX_UNREAD", 0)


class Unread(PlainStream):
    """Tells when the end has come, and takes nothing."""

    __slots__ = ()

    def notify(self) -> None:
        if isinstance(self.events[-1], Finished):
            self._news.set()

    def wait_for_end(self) -> list:
        assert self._news.wait(HANG_S)
        return list(self.events)


class Read(Unread):
    """Takes in all that has come whenever it is woken."""

    __slots__ = ("_seen",)

    def __init__(self, loop: object) -> None:
        super().__init__(loop)
        self._seen: list = []

    def notify(self) -> None:
        super().notify()
        self._seen += self.events
        self.events.clear()

    def wait_for_end(self) -> list:
        super().wait_for_end()
        return self._seen


@pytest.mark.parametrize("eager", [True, False], ids=["a step", "the end"])
def test_a_stalled_reader_does_not_fill_the_memory(loop, started, eager):
    """
    The request ends with a typed error; its buffer and its times are as many as slots hold.
    """
    executor = FakeExecutor(fake_limits(n_slots=1, n_ctx_slot=32))
    started(thread := make_thread(executor, context_full="shift"))
    stream = Unread(loop)
    stream.eager = eager

    thread.submit_all((make_request(0, max_tokens=ENDLESS),), stream)
    *tokens, end = stream.wait_for_end()

    assert isinstance(end.error, OutputUnread)
    assert end.error.limit == 32
    assert 32 <= len(tokens) <= 34
    assert len(end.timings.itl) < 32 <= end.n_output


def test_an_output_may_outgrow_its_slot_while_it_is_read(loop, started):
    """
    The reader that wants the end only is woken now and then, and misses nothing.
    """
    executor = FakeExecutor(fake_limits(n_slots=1, n_ctx_slot=32))
    started(thread := make_thread(executor, context_full="shift"))
    stream = Read(loop)
    stream.eager = False

    thread.submit_all((make_request(0, max_tokens=500),), stream)
    *events, end = stream.wait_for_end()

    assert sum(len(e.tokens) for e in events if type(e) is NewTokens) == 500
    assert (end.error, end.n_output) == (None, 500)
    assert end.timings.first_token < end.timings.last_token
