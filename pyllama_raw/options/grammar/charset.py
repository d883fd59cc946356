"""
Sets of characters as sets of bytes: what the UTF-8 of a range of characters looks like.

NUL is in no set: no token that is sampled writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_CHAR = 0x10FFFF
Range = tuple[int, int]  # both ends included

# Within each of these, UTF-8 has one length; surrogates have none.
_WIDTHS: tuple[Range, ...] = (
    (0x01, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, MAX_CHAR),
)  # fmt: skip


def complement(ranges: Sequence[Range]) -> list[Range]:
    """All characters that *ranges* leave out."""
    found: list[Range] = []
    start = 0
    for low, high in sorted(r for r in ranges if r[0] <= r[1]):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, MAX_CHAR)]


def byte_ranges(ranges: Sequence[Range]) -> Iterator[tuple[Range, ...]]:
    """
    Sequences of ranges of bytes that together are *ranges* in UTF-8.

    A character is in the set if each byte is in its range of one sequence.
    """
    for low, high in ranges:
        for first, last in _WIDTHS:
            if max(low, first) <= min(high, last):
                yield from _split(max(low, first), min(high, last))


def _split(low: int, high: int) -> Iterator[tuple[Range, ...]]:
    """Of one width: cut until every byte has a range of its own."""
    n_bytes = len(chr(low).encode())
    for place in range(1, n_bytes):
        mask = (1 << 6 * place) - 1  # what the last *place* bytes say
        if low | mask == high | mask:
            continue
        if low & mask:
            yield from _split(low, low | mask)
            yield from _split((low | mask) + 1, high)
            return
        if high & mask != mask:
            yield from _split(low, (high & ~mask) - 1)
            yield from _split(high & ~mask, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
