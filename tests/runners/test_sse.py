"""Events out of bytes, wherever these are split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.runners import sse
from pyllama_raw.runners.errors import UnexpectedAnswer
from pyllama_raw.runners.sse import EventReader, ServerEvent

STREAM = 'data: {"x":1}\n\n: a comment\ndata:{"ü":2}\n\nevent: end\ndata: a\ndata:  b\n\ndata: [DONE]\n\n'
EVENTS = [
    ServerEvent('{"x":1}'),
    ServerEvent('{"ü":2}'),
    ServerEvent("a\n b", "end"),
    ServerEvent("[DONE]"),
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("n", [1, 2, 3, 1000])
def test_every_split_gives_the_same_events(end, n):
    """
    Whatever ends lines: byte by byte too, and [DONE] is told.
    """
    received = STREAM.replace("\n", end).encode()
    reader = EventReader()
    events = []
    for at in range(0, len(received), n):
        events += reader.feed(received[at : at + n])

    assert events == EVENTS


@given(st.lists(st.integers(0, 200)), st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_split_gives_the_same_events(cuts, end):
    """
    At any places.
    """
    received = STREAM.replace("\n", end).encode()
    reader, events, at = EventReader(), [], 0
    for cut in sorted(cuts):
        events += reader.feed(received[at:cut])
        at = max(at, cut)
    events += reader.feed(received[at:])

    assert events == EVENTS


def test_what_is_broken_off_is_no_event():
    """
    Its empty line has not come.
    """
    assert EventReader().feed(b'data: {"x":1}\n') == []


def test_an_event_without_an_end_does_not_fill_the_memory(monkeypatch):
    """
    In one line and in many.
    """
    monkeypatch.setattr(sse, "MAX_CHARACTERS", 100)

    for line in (b"data: aaaaaaaa", b"data: aaaaaaaa\n"):
        reader = EventReader()
        for _ in range(6):
            reader.feed(line)
        with pytest.raises(UnexpectedAnswer):
            reader.feed(line * 20)
