"""How pictures look: colours that everybody can tell apart, and lines that differ besides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
MARKERS = "osD^vPX"
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
    shown: dict[str, Any] = {}
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    if len(shown) > 1:
        columns = min(len(shown), 7)
        figure.legend(
            shown.values(), shown.keys(), loc="outside lower center", ncols=columns
        )
    return figure


def cdf(ax: Axes, values: Iterable[float], index: int, label: str) -> None:
    """The share of *values* that are at most so large, of a thousand points at most."""
    known = sorted(values)
    if not known:
        return
    n_points = min(len(known), 1000)
    places = [
        round(i * (len(known) - 1) / max(n_points - 1, 1)) for i in range(n_points)
    ]
    shares = [100 * (place + 1) / len(known) for place in places]
    xs = [known[place] for place in places]
    ax.step([xs[0], *xs], [0, *shares], where="post", label=label, **look(index))


def seconds_axis(ax: Axes, label: str, values: Sequence[float]) -> None:
    """An axis of latencies: logarithmic where they differ much."""
    positive = sorted(value for value in values if value > 0)
    ax.set_xlabel(f"{label} (s)")
    if positive and positive[-1] > 50 * positive[len(positive) // 2]:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
