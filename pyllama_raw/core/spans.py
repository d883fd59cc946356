"""
Spans of a prompt: rows that are no text, as those of an image.

Core counts indices: each row of a sequence has one, and takes one cell. A token of text takes
one position, too. The rows of a span share `n_pos` positions, at most as many as they are:
those of an image of 16 x 16 may take 256 cells and 16 positions. So where there is no span,
which is nearly always, an index is a position.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple


class Span(NamedTuple):
    """
    Rows that go together: memory has all of them for others, or none.

    In the tokens of a prompt a row is a number below 0, the same for all rows of the span.
    Numbers are of one engine, and stand for keys.
    """

    start: int  # index of the first row
    stop: int  # index after the last one
    n_pos: int  # positions they take together
    is_causal: bool = True  # if not, the rows see each other: one decode has them all
    key: bytes = b""  # of any engine: equal only if the rows are; empty: in no file


Spans = tuple[Span, ...]  # rising, and apart


def are_valid(spans: Spans, n_prompt: int) -> bool:
    """Whether a prompt can have them; it ends with text, because that is sampled from."""
    # Rising and apart is as much as sorted starts and stops.
    borders = [border for span in spans for border in span[:2]]
    return borders == sorted(borders) and all(
        0 <= span.start < span.stop < n_prompt
        and 1 <= span.n_pos <= span.stop - span.start
        for span in spans
    )


def text_of(tokens: array[int], spans: Spans) -> array[int]:
    """*tokens* without those that stand for rows: all that is text."""
    if not spans:
        return tokens
    text, start = array("i"), 0
    for span in spans:
        text += tokens[start : span.start]
        start = span.stop
    return text + tokens[start:]


def position(spans: Spans, index: int) -> int:
    """The position of the row with *index*; inside a span it is that of the first row."""
    n_less = 0
    for start, stop, n_pos, *_ in spans:
        # It is in this span, or in the text before it.
        if index < stop:
            return min(index, start) - n_less
        n_less += stop - start - n_pos
    return index - n_less


def whole(spans: Spans, n_rows: int) -> int:
    """
    The most of the first *n_rows* that end with no part of a span.

    Nor do they leave a single token before one, of several: see core.exact.
    """
    text = 0  # where the text before a span begins
    for start, stop, *_ in spans:
        # The end is in the text before this span.
        if n_rows <= start:
            leaves_one = text < n_rows == start - 1
            return n_rows - leaves_one
        # The end is inside of it, so all of it goes.
        if n_rows < stop:
            return start
        text = stop
    return n_rows


def border(spans: Spans, index: int) -> int | None:
    """The end of the text or the span of *index*; None: no span follows."""
    for start, stop, *_ in spans:
        if index < stop:
            return start if index < start else stop
    return None


def span_at(spans: Spans, index: int) -> int | None:
    """The span that has the row with *index*; None: it is text."""
    for number, span in enumerate(spans):
        if index < span.stop:
            return number if index >= span.start else None
    return None
