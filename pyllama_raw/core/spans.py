"""
Where a prompt has rows that are no text, as those of an image.

Core counts indices: each row of a sequence has one, and takes one cell. A token of text takes
one position, too. The rows of a span share `n_pos` positions, at most as many as they are:
those of an image of 16 x 16 may take 256 cells and 16 positions. So where there is no span,
which is nearly always, an index is a position.
"""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Rows that go together: memory has all of them for others, or none."""

    start: int  # index of the first row
    stop: int  # index after the last one
    n_pos: int  # positions they take together


Spans = tuple[Span, ...]  # rising, and apart


def are_valid(spans: Spans, n_prompt: int) -> bool:
    """Whether a prompt can have them; it ends with text, because that is sampled from."""
    borders = [border for span in spans for border in span[:2]]
    return borders == sorted(borders) and all(
        0 <= start < stop < n_prompt and 1 <= n_pos <= stop - start
        for start, stop, n_pos in spans
    )


def position(spans: Spans, index: int) -> int:
    """Of the row with *index*; inside a span it is that of the first row."""
    n_less = 0
    for start, stop, n_pos in spans:
        if index < stop:
            return min(index, start) - n_less
        n_less += stop - start - n_pos
    return index - n_less


def whole(spans: Spans, n_rows: int) -> int:
    """The most of the first *n_rows* that end with no part of a span."""
    for start, stop, _ in spans:
        if start < n_rows < stop:
            return start
    return n_rows


def border(spans: Spans, index: int) -> int | None:
    """Where the text or the span of *index* ends; None: no span follows."""
    for start, stop, _ in spans:
        if index < stop:
            return start if index < start else stop
    return None
