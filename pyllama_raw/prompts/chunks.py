"""
Long texts cut into chunks of so many tokens, as for an index of documents.

Rules:
1. Each chunk is a part of the text, character for character, with at most *max_tokens* tokens
   as embed() counts them, its first and last control tokens included.
2. A chunk ends behind white space if there is any in its last third.
3. A chunk begins with up to *overlap* tokens of the end of the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

CHARS_OF_TOKEN = 4  # a first guess
LAST_THIRD = 2 / 3


def chunks(
    text: str, max_tokens: int, overlap: int, count: Callable[[str], int]
) -> Iterator[str]:
    """
    The chunks of *text*, which is not empty.

    Args:
        count: tokens of a text; called about ten times a chunk, with texts of its length.
    """
    start = 0
    while True:
        stop = _longest_end(text, start, max_tokens, count)
        if stop < len(text):
            stop = _behind_space(text, start, stop)
        yield text[start:stop]
        if stop == len(text):
            return
        if not overlap:
            start = stop
            continue
        # The overlap begins at a word, too, and the next chunk is never where this one was.
        begin = _earliest_start(text, start, stop, overlap, count)
        start = max(begin, start + 1)


def _longest_end(
    text: str, start: int, max_tokens: int, count: Callable[[str], int]
) -> int:
    """The largest end of a part that begins at *start* and fits; one character always does."""
    fits, n_chars = start + 1, max_tokens * CHARS_OF_TOKEN
    while True:  # double, until a part does not fit
        end = min(start + n_chars, len(text))
        if count(text[start:end]) > max_tokens:
            break
        if end == len(text):
            return end
        fits, n_chars = end, 2 * n_chars
    while end - fits > 1:  # then halve what is between
        middle = (fits + end) // 2
        if count(text[start:middle]) > max_tokens:
            end = middle
        else:
            fits = middle
    return fits


def _earliest_start(
    text: str, start: int, stop: int, overlap: int, count: Callable[[str], int]
) -> int:
    """The first place behind *start* from which a part to *stop* has at most *overlap* tokens."""
    n_special = count("")
    low, high = start, stop
    while high - low > 1:
        middle = (low + high) // 2
        if count(text[middle:stop]) - n_special > overlap:
            low = middle
        else:
            high = middle
    for at in range(high, stop):
        if text[at].isspace():
            return at + 1
    return high


def _behind_space(text: str, start: int, stop: int) -> int:
    for at in range(stop, start + int(LAST_THIRD * (stop - start)), -1):
        if text[at - 1].isspace():
            return at
    return stop
