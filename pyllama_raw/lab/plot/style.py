"""The look of pictures: colours that everybody can tell apart, and lines that differ besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

# Okabe and Ito, Color Universal Design, 2008; yellow is left out, it is pale on white.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
LINES = ("-", "--", "-.", ":")
STYLE: Any = {
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "pyllama_raw",  # the same data give the same file
}


def look(index: int) -> dict[str, Any]:
    """Colour and line of one of several."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[index % len(LINES)],
    }


def canvas(
    n_columns: int, n_rows: int = 1, *, width: float = 9.0, height: float = 3.4
) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches, and its axes."""
    figure = Figure((width, height), layout="constrained")
    places = range(1, n_columns * n_rows + 1)
    return figure, [figure.add_subplot(n_rows, n_columns, place) for place in places]


def legend(figure: Figure) -> Figure:
    """Name each line once, below the plots: there it covers nothing."""
    lines: dict[str, Any] = {}
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    if len(lines) > 1:
        columns = min(len(lines), 7)
        figure.legend(
            lines.values(), lines.keys(), loc="outside lower center", ncols=columns
        )
    return figure


def cdf(ax: Axes, values: Sequence[float], index: int, label: str) -> None:
    """The per cent of *values* that are at most so large."""
    if len(values):
        ax.ecdf(values, label=label, **look(index))
    ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    ax.set_ylim(0, 1.01)


def cdfs(times: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure | None:
    """Latencies by what they are of, then by name; an axis is logarithmic if they differ much."""
    if not any(values for lines in times.values() for values in lines.values()):
        return None
    figure, axes = canvas(len(times))
    for ax, (label, lines) in zip(axes, times.items(), strict=True):
        for index, (name, values) in enumerate(lines.items()):
            cdf(ax, values, index, name)
        ax.set(xlabel=f"{label} (s)", ylabel="per cent")
        numbers = sorted(v for values in lines.values() for v in values if v > 0)
        if numbers and numbers[-1] > 50 * numbers[len(numbers) // 2]:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
    return legend(figure)
