"""Tables of the commands: aligned columns, numbers of three digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, isfinite, log10

Row = Mapping[str, object]


def table(lines: Sequence[Row]) -> list[str]:
    """Lines of text, a column for every key: words to the left, the rest to the right."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    cells = [columns, *([_cell(line.get(c, "")) for c in columns] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_word = [all(_is_word(line.get(c, "")) for line in lines) for c in columns]
    return [
        "  ".join(
            text.ljust(width) if word else text.rjust(width)
            for text, width, word in zip(line, widths, is_word, strict=True)
        ).rstrip()
        for line in cells
    ]


def _is_word(value: object) -> bool:
    return isinstance(value, str) and not value[:1].isdigit()


def _cell(value: object) -> str:
    """A measured number with three digits, anything else as it is."""
    return digits(value) if isinstance(value, float) else str(value)


def digits(value: float) -> str:
    """*value* with three significant digits and no exponent."""
    if not isfinite(value) or not value:
        return f"{value:g}"
    n_decimals = 2 - floor(log10(abs(value)))
    rounded = round(value, n_decimals)
    return f"{rounded:.{max(2 - floor(log10(abs(rounded))), 0)}f}"
