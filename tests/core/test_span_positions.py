"""Prompts with rows that are no text: indices and positions."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.request import (
    Span,
    are_valid,
    border,
    position,
    span_at,
    text_of,
    whole,
)


@st.composite
def spans_of(draw):
    """Spans of a prompt, and the number of its rows."""
    spans, index = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start = index + draw(st.integers(0, 4))
        index = start + draw(st.integers(1, 9))
        spans.append(Span(start, index, draw(st.integers(1, index - start))))
    return tuple(spans), index + draw(st.integers(1, 4))


@given(spans_of())
def test_positions_are_those_of_counting(prompt):
    """
    Text counts one each; a span counts as a whole, and is kept as a whole.
    """
    spans, n_rows = prompt
    inside = {i: s for s in spans for i in range(s.start, s.stop)}
    starts, pos = [], 0
    for index in range(n_rows):
        span = inside.get(index)
        starts.append(pos)
        if span is None:
            pos += 1
        elif index == span.stop - 1:
            pos += span.n_pos

    assert are_valid(spans, n_rows)
    assert [position(spans, i) for i in range(n_rows + 3)] == [
        *starts,
        *range(pos, pos + 3),
    ]
    for index in range(n_rows):
        span = inside.get(index)
        later = [s.start for s in spans if s.start > index]
        text = max((s.stop for s in spans if s.stop <= index), default=0)
        kept = index
        if span is not None and index > span.start:
            kept = span.start
        elif span is None and index > text and index + 1 in later:
            kept = index - 1  # else a single token would be left
        assert whole(spans, index) == kept
        end = span.stop if span is not None else min(later, default=None)
        assert border(spans, index) == end
        number = spans.index(span) if span is not None else None
        assert span_at(spans, index) == number
    tokens = array("i", [-1 if i in inside else i for i in range(n_rows)])
    assert list(text_of(tokens, spans)) == [i for i in range(n_rows) if i not in inside]


@pytest.mark.parametrize(
    "spans",
    [
        (Span(0, 4, 5),),  # more positions than rows
        (Span(0, 4, 0),),
        (Span(2, 2, 1),),
        (Span(4, 8, 4), Span(0, 2, 2)),
        (Span(0, 4, 4), Span(3, 6, 3)),
        (Span(6, 10, 4),),  # nothing to sample from
    ],
)
def test_spans_that_no_prompt_can_have(spans):
    """
    They rise, are apart, and text follows the last one.
    """
    assert not are_valid(spans, 10)
