"""
Pictures of what an engine or a simulation did, from its logs.

    pictures(Path("fcfs.jsonl"), Path("sjf.jsonl"), Path("bench.jsonl")).save(Path("plots"))

In a notebook the value of `pictures(...)` shows itself. The first line of a file says what the file
is. Everybody can tell the colours apart, and lines differ besides.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pyllama_raw.core.policies import OUTPUT_COST
from pyllama_raw.engine.logs import RequestRecord, read_records
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.calls import Result, told_apart
from pyllama_raw.lab.report import groups, middle, most_busy, read_results, short_names
from pyllama_raw.lab.sim import Figures

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


def bench_figures(results: Sequence[Result]) -> dict[str, Figure | None]:
    """Plots by file name, with a line for each conditions; None where values are missing."""
    results = told_apart(results)
    draws: dict[str, Draw] = {
        "latency-by-rate": _over("request_rate", "calls a second", BY_RATE),
        "throughput-by-clients": _over("max_concurrency", "clients", BY_CLIENTS),
        "itl-timeline": itl_timeline,
        "latency-cdf": _latency_cdf,
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


def _latency_cdf(results: Sequence[Result]) -> Figure | None:
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


UNDATED = {"Date": None}  # the same data give the same file


class Pictures(dict[str, Figure]):
    """Figures by name."""

    def save(self, folder: Path) -> None:
        """Each as NAME.svg and NAME.png."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in self.items():
            _save(figure, folder / f"{name}.svg", metadata=UNDATED)
            _save(figure, folder / f"{name}.png", dpi=150)

    def _repr_html_(self) -> str:
        """All of them, one below the other."""
        return "\n".join(map(_svg, self.values()))


def pictures(*paths: Path) -> Pictures:
    """
    Draw all that can be drawn of request logs and results of `bench`.

    The name of a request log, as `fcfs.jsonl`, is that of its line.

    Raises:
        ConfigError: a file is none of these, or there is nothing in it to be seen.
    """
    logs: dict[str, list[RequestRecord]] = {}
    results: list[Any] = []
    for path in paths:
        with path.open() as file:
            first = file.readline()
        if '"n_prefill"' in first:
            raise ConfigError(f"{path} is a step log: give it to the command trace")
        try:
            if '"submitted_s"' in first:
                records = read_records(path, RequestRecord)
                counted = [record for record in records if not record.warms_up]
                logs |= {path.stem: counted} if counted else {}
            else:
                results += read_results(path)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no log and no result: {error}") from error
    with rc_context(STYLE):
        drawings = _of_logs(logs) | (bench_figures(results) if results else {})
    figures = {name: figure for name, figure in drawings.items() if figure is not None}
    if not figures:
        raise ConfigError("there is nothing in these files to be seen")
    return Pictures(figures)


def compared(results: Sequence[Figures]) -> Pictures:
    """The latencies of simulations, a line for each policy."""
    ttft = {result.name: result.ttft_s for result in results}
    e2e = {result.name: result.e2e_s for result in results}
    with rc_context(STYLE):
        figure = cdfs({"TTFT": ttft, "E2E": e2e})
    return Pictures({} if figure is None else {"compared": figure})


def _of_logs(logs: dict[str, list[RequestRecord]]) -> dict[str, Figure | None]:
    if not logs:
        return {}
    return {
        "latency-cdf": latency_cdf(logs),
        "fairness": fairness(logs),
    }


def _save(figure: Figure, path: Path, **options: Any) -> None:
    """Write beside and rename: what was there stays until the plot is whole."""
    part = path.with_name(f".{path.name}")
    with rc_context(STYLE):
        figure.savefig(part, format=path.suffix[1:], **options)
    part.replace(path)


def _svg(figure: Figure) -> str:
    text = StringIO()
    with rc_context(STYLE):
        figure.savefig(text, format="svg", metadata=UNDATED)
    return text.getvalue()


Logs = Mapping[str, Sequence[RequestRecord]]  # by name
MAX_CLIENTS = 6  # the clients that sent most
SERVED = {"stop", "length"}


def latency_cdf(logs: Logs) -> Figure | None:
    """The share of requests that took at most so long, a line for each log."""
    ttft = {
        name: [
            r.first_token_s - r.submitted_s for r in log if r.first_token_s is not None
        ]
        for name, log in logs.items()
    }
    e2e = {
        name: [r.finished_s - r.submitted_s for r in log if r.why in SERVED]
        for name, log in logs.items()
    }
    return cdfs({"TTFT": ttft, "E2E": e2e})


def fairness(logs: Logs) -> Figure | None:
    """Tokens that each client was served over time, and times of its requests."""
    clients = _clients(logs)
    if len(clients) < 2:
        return None
    height = 0.6 + 2.6 * len(logs)
    figure, axes = canvas(2, len(logs), height=height)
    most_s = max(r.finished_s for log in logs.values() for r in log)
    for row, (name, log) in enumerate(logs.items()):
        served, took = axes[2 * row : 2 * row + 2]
        start = min((record.submitted_s for record in log), default=0.0)
        for index, client in enumerate(clients):
            label = "no client" if client is None else client
            mine = sorted(
                (r for r in log if r.client == client and r.why in SERVED),
                key=lambda record: record.finished_s,
            )
            totals = [0.0, *accumulate(map(_service, mine))]
            times = [0.0, *(record.finished_s - start for record in mine)]
            served.step(times, totals, where="post", label=label, **look(index))
            cdf(took, [r.finished_s - r.submitted_s for r in mine], index, label)
        served.set(title=f"{name}: service over time", ylabel="tokens, output twice")
        served.set_xlim(0, most_s - start)
        took.set(title=f"{name}: E2E of their requests", ylabel="% of requests")
    for ax, label in zip(axes[-2:], ("seconds", "E2E (s)"), strict=True):
        ax.set_xlabel(label)
    return legend(figure)


def _service(record: RequestRecord) -> float:
    return record.n_prompt + OUTPUT_COST * record.n_output


def _clients(logs: Logs) -> list[str | None]:
    """The clients that sent most, by name."""
    counts: dict[str | None, int] = {}
    for log in logs.values():
        for record in log:
            counts[record.client] = counts.get(record.client, 0) + 1
    first = sorted(counts, key=lambda client: -counts[client])[:MAX_CLIENTS]
    return sorted(first, key=str)


def plot(options: Namespace) -> int:
    """Run the command `plot`; return its exit status."""
    figures = pictures(*options.files)
    figures.save(options.out)
    for name in figures:
        sys.stdout.write(f"{options.out / name}.svg, .png\n")
    return 0
