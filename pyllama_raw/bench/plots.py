"""Plots of results, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyllama_raw.bench.result import Result
from pyllama_raw.bench.table import groups, middle

STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "pyllama_raw",  # the same results give the same file
}
MAX_DOTS = 20_000  # of a scatter plot

Draw = Callable[[Sequence[Result]], Figure | None]


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """The plots that *results* have values for, by file name."""
    draws: dict[str, Draw] = {
        "latency-by-rate": latency_by_rate,
        "throughput-by-clients": throughput_by_clients,
        "itl-timeline": itl_timeline,
        "latency-cdf": latency_cdf,
    }
    with rc_context(STYLE):
        drawn = {name: draw(results) for name, draw in draws.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def write_plots(drawn: dict[str, Figure], folder: Path) -> None:
    """Each as NAME.svg and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=150)


def latency_by_rate(results: Sequence[Result]) -> Figure | None:
    """Open loop: TTFT and TPOT over calls a second."""
    sent = [r for r in results if isinstance(r["request_rate"], int | float)]
    if not sent:
        return None
    figure, axes = _canvas(3)
    _against(axes[0], sent, "request_rate", "median_ttft_ms", "TTFT, median (ms)")
    _against(axes[1], sent, "request_rate", "p99_ttft_ms", "TTFT, p99 (ms)")
    _against(axes[2], sent, "request_rate", "median_tpot_ms", "TPOT, median (ms)")
    for ax in axes:
        ax.set_xlabel("calls a second")
    return figure


def throughput_by_clients(results: Sequence[Result]) -> Figure | None:
    """Closed loop: tokens a second, and what a call waits, over clients."""
    sent = [r for r in results if r["max_concurrency"] is not None]
    if not sent:
        return None
    figure, axes = _canvas(2)
    key, label = "output_throughput", "output tokens a second"
    _against(axes[0], sent, "max_concurrency", key, label)
    _against(axes[1], sent, "max_concurrency", "p99_ttft_ms", "TTFT, p99 (ms)")
    for ax in axes:
        ax.set_xlabel("clients")
    return figure


def _against(
    ax: Axes, results: Sequence[Result], x_key: str, y_key: str, label: str
) -> None:
    """A line for each target: medians of rounds, from the smallest to the largest."""
    for target in _targets(results):
        points: dict[float, list[Result]] = {}
        for result in results:
            if result["target"] == target and result[y_key] is not None:
                points.setdefault(result[x_key], []).append(result)
        xs = sorted(points)
        ys = [middle(points[x], y_key) or 0.0 for x in xs]
        ranges = [[run[y_key] for run in points[x]] for x in xs]
        below = [y - min(values) for y, values in zip(ys, ranges, strict=True)]
        above = [max(values) - y for y, values in zip(ys, ranges, strict=True)]
        ax.errorbar(xs, ys, yerr=[below, above], marker="o", capsize=3, label=target)
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0)
    ax.legend()


def itl_timeline(results: Sequence[Result]) -> Figure | None:
    """Every gap at the moment it ended, in one round: stalls stand out."""
    figure, (ax,) = _canvas(1, width=8.0)
    n_dots = 0
    for target, result in _last_point(results):
        times, gaps = [], []
        for start, ttft, itl in zip(
            result["start_times"], result["ttfts"], result["itls"], strict=True
        ):
            if itl:
                first, *ends = accumulate([start + ttft, *itl])
                del first
                times += ends
                gaps += [gap * 1e3 for gap in itl]
        ax.scatter(times[:MAX_DOTS], gaps[:MAX_DOTS], s=4, label=target, alpha=0.6)
        n_dots += len(gaps)
    ax.set_xlabel("seconds after the start")
    ax.set_ylabel("gap between tokens (ms)")
    ax.set_yscale("log")
    ax.legend()
    return figure if n_dots else None


def latency_cdf(results: Sequence[Result]) -> Figure | None:
    """Share of calls (of gaps) that took at most so long, all rounds of one point."""
    figure, axes = _canvas(3)
    n_values = 0
    for (point, target), runs in groups(results).items():
        if point != _points(results)[-1]:
            continue
        calls = [value for run in runs for value in run["ttfts"]]
        whole = [value for run in runs for value in run["latencies"]]
        gaps = [gap for run in runs for itl in run["itls"] for gap in itl or ()]
        for ax, values in zip(axes, (calls, gaps, whole), strict=True):
            known = sorted(value for value in values if value is not None)
            n_values += len(known)
            shares = [i / len(known) for i in range(len(known) + 1)]
            ax.step([*known[:1], *known], shares, where="post", label=target)
    for ax, label in zip(axes, ("TTFT", "ITL", "E2EL"), strict=True):
        ax.set_xlabel(f"{label} (s)")
        ax.set_ylim(0, 1)
    axes[1].set_xscale("log")
    axes[1].xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("share")
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels))
    return figure if n_values else None


def _last_point(results: Sequence[Result]) -> Iterable[tuple[str, Result]]:
    """The first round of each target at the last point."""
    for (point, target), runs in groups(results).items():
        if point == _points(results)[-1]:
            yield target, runs[0]


def _points(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(point for point, _ in groups(results)))


def _targets(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result["target"] for result in results))


def _canvas(n_axes: int, width: float = 3.6) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * n_axes, 3.2), layout="constrained")
    return figure, [figure.add_subplot(1, n_axes, i + 1) for i in range(n_axes)]
