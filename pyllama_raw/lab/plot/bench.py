"""Pictures of the results of `bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyllama_raw.lab.bench.conditions import told_apart
from pyllama_raw.lab.bench.report import groups, middle, most_busy, short_names
from pyllama_raw.lab.bench.result import Result
from pyllama_raw.lab.plot.style import canvas, cdfs, legend

BUSY = "others used the CPUs"
WIDTH, HEIGHT = 10.8, 3.2  # inches
MAX_DOTS = 20_000  # of a scatter plot
BY_RATE = {
    "median_ttft_ms": "TTFT, median (ms)",
    "p99_ttft_ms": "TTFT, p99 (ms)",
    "median_tpot_ms": "TPOT, median (ms)",
}
BY_CLIENTS = {
    "output_throughput": "output tokens a second",
    "p99_ttft_ms": "TTFT, p99 (ms)",
}

Draw = Callable[[Sequence[Result]], Figure | None]


def figures(results: Sequence[Result]) -> dict[str, Figure | None]:
    """Plots by file name, with a line for each conditions; None where values are missing."""
    results = told_apart(results)
    draws: dict[str, Draw] = {
        "latency-by-rate": _over("request_rate", "calls a second", BY_RATE),
        "throughput-by-clients": _over("max_concurrency", "clients", BY_CLIENTS),
        "itl-timeline": itl_timeline,
        "latency-cdf": latency_cdf,
    }
    return {name: draw(results) for name, draw in draws.items()}


def _over(x_key: str, x_label: str, labels: dict[str, str]) -> Draw:
    """A function that draws each key of *labels* over *x_key*, side by side."""

    def draw(results: Sequence[Result]) -> Figure | None:
        sent = [run for run in results if isinstance(run[x_key], int | float)]
        if not sent:
            return None
        figure, axes = canvas(len(labels), width=WIDTH, height=HEIGHT)
        for ax, (y_key, label) in zip(axes, labels.items(), strict=True):
            _against(ax, sent, x_key, y_key, label)
            ax.set_xlabel(x_label)
        return legend(figure)

    return draw


def _against(
    ax: Axes, results: Sequence[Result], x_key: str, y_key: str, label: str
) -> None:
    """A line for each target: medians of rounds, from the smallest to the largest."""
    measured = [result for result in results if result[y_key] is not None]
    values = sorted({result[x_key] for result in measured})
    names = _names(results)
    for index, (target, name) in enumerate(names.items()):
        points: dict[int, list[Result]] = {}
        for result in measured:
            if result["target"] == target:
                points.setdefault(values.index(result[x_key]), []).append(result)
        # Targets stand beside each other, so that their bars can be told apart.
        aside = (index - (len(names) - 1) / 2) * min(0.12, 0.5 / len(names))
        _line(ax, {x + aside: points[x] for x in sorted(points)}, y_key, name)
    ax.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    ax.set_xlim(-0.5, len(values) - 0.5)
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0)


def _line(ax: Axes, points: dict[float, list[Result]], y_key: str, name: str) -> None:
    xs = list(points)
    ys = [middle(points[x], y_key) or 0.0 for x in xs]
    ranges = [[run[y_key] for run in points[x]] for x in xs]
    below = [y - min(values) for y, values in zip(ys, ranges, strict=True)]
    above = [max(values) - y for y, values in zip(ys, ranges, strict=True)]
    ax.errorbar(xs, ys, yerr=[below, above], marker="o", ms=4, capsize=3, label=name)
    busy = [(x, run[y_key]) for x in xs for run in points[x] if most_busy([run])]
    if busy:
        ax.scatter(
            *zip(*busy, strict=True), marker="x", color="#a00", zorder=3, label=BUSY
        )


def itl_timeline(results: Sequence[Result]) -> Figure | None:
    """Every gap at the moment it ended, in one round: stalls stand out."""
    last = _last_point(results)
    figure, axes = canvas(1, len(last), width=WIDTH, height=1.9 * len(last))
    n_dots = 0
    colours = {name: f"C{i}" for i, name in enumerate(_names(results).values())}
    for ax, (name, (result, *_)) in zip(axes, last.items(), strict=True):
        times, gaps = [], []
        for start, ttft, itl in zip(
            result["start_times"], result["ttfts"], result["itls"], strict=True
        ):
            if itl:
                times += list(accumulate([start + ttft, *itl]))[1:]
                gaps += [gap * 1e3 for gap in itl]
        ax.scatter(
            times[:MAX_DOTS], gaps[:MAX_DOTS], s=4, alpha=0.6, color=colours[name]
        )
        busy = f" ({BUSY})" if most_busy([result]) is not None else ""
        ax.set_title(f"{name}{busy}")
        ax.set_ylabel("gap (ms)")
        ax.set_yscale("log")
        n_dots += len(gaps)
    if not n_dots:
        return None
    for ax in axes:  # one scale, so that targets can be compared
        ax.set_xlim(0, max(other.get_xlim()[1] for other in axes))
        low, high = zip(*(other.get_ylim() for other in axes), strict=True)
        ax.set_ylim(min(low), max(high))
    axes[-1].set_xlabel("seconds after the start")
    return figure


def latency_cdf(results: Sequence[Result]) -> Figure | None:
    """Share of calls (of gaps) that took at most so long, all rounds of one point."""
    last = _last_point(results)
    gaps = {
        name: [gap for run in runs for itl in run["itls"] for gap in itl or ()]
        for name, runs in last.items()
    }
    return cdfs(
        {"TTFT": _calls(last, "ttfts"), "ITL": gaps, "E2EL": _calls(last, "latencies")}
    )


def _calls(last: dict[str, list[Result]], key: str) -> dict[str, list[float]]:
    return {
        name: [value for run in runs for value in run[key] if value is not None]
        for name, runs in last.items()
    }


def _last_point(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The rounds of each target, by its short name, at the last point."""
    names, runs_of = _names(results), groups(results)
    last = list(dict.fromkeys(point for point, _ in runs_of))[-1]
    return {names[target]: runs for (p, target), runs in runs_of.items() if p == last}


def _names(results: Sequence[Result]) -> dict[str, str]:
    return short_names(result["target"] for result in results)
