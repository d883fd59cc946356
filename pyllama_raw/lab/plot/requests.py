"""How long requests took, how many were in time, and who was served; from request logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib.figure import Figure

from pyllama_raw.core.policies.vtc import OUTPUT_COST
from pyllama_raw.engine.request_log import RequestRecord
from pyllama_raw.lab.plot.style import MARKERS, canvas, cdf, legend, look, seconds_axis

Logs = Mapping[str, Sequence[RequestRecord]]  # by name
MAX_CLIENTS = 6  # those who sent most
SERVED = {"stop", "length"}


def latency_cdf(logs: Logs) -> Figure | None:
    """
    The share of requests that took at most so long, a line for each log.

    Of several rates only the highest is shown.
    """
    logs = _busiest(logs)
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


def _busiest(logs: Logs) -> Logs:
    """Of logs whose names are equal up to an `@` the one with the highest rate."""
    found: dict[str, str] = {}
    for name in sorted(logs, key=lambda name: _rates(logs[name])[0]):
        found[name.partition("@")[0]] = name
    return {name: logs[name] for name in sorted(found.values())}


def cdfs(times: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure | None:
    """Latencies by what they are of, then by name."""
    if not any(values for named in times.values() for values in named.values()):
        return None
    figure, axes = canvas(len(times))
    for ax, (label, named) in zip(axes, times.items(), strict=True):
        for index, (name, values) in enumerate(named.items()):
            cdf(ax, values, index, name)
        seconds_axis(
            ax, label, [value for values in named.values() for value in values]
        )
        ax.set_ylim(0, 101)
        ax.set_ylabel("% of requests")
    return legend(figure)


def goodput(logs: Logs) -> Figure | None:
    """
    Requests a second that were served in time, against those that came.

    Logs whose names are equal up to an `@` are points of a line.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, log in logs.items():
        if len(log) > 1:
            lines.setdefault(name.partition("@")[0], []).append(_rates(log))
    if max(map(len, lines.values()), default=0) < 2:
        return None
    figure, (ax,) = canvas(1, width=5.4, height=4)
    most = max(rate for points in lines.values() for rate, _ in points)
    ax.plot([0, most], [0, most], color="0.7", lw=1, label="all in time")
    for index, (name, points) in enumerate(lines.items()):
        marker = MARKERS[index % len(MARKERS)]
        ax.plot(
            *zip(*sorted(points), strict=True), marker=marker, label=name, **look(index)
        )
    ax.set(xlabel="requests a second", ylabel="of them served in time")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    return legend(figure)


def _rates(log: Sequence[RequestRecord]) -> tuple[float, float]:
    """Requests a second that came, and that were served, while they came."""
    came = [record.submitted_s for record in log]
    span_s = max(max(came) - min(came), 1e-9)
    n_good = sum(record.why in SERVED for record in log)
    return (len(log) - 1) / span_s, n_good / len(log) * (len(log) - 1) / span_s


def fairness(logs: Logs) -> Figure | None:
    """What each client was served over time, and how long its requests took."""
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
        took.set_ylim(0, 101)
    for ax, label in zip(axes[-2:], ("seconds", "E2E (s)"), strict=True):
        ax.set_xlabel(label)
    return legend(figure)


def _service(record: RequestRecord) -> float:
    return record.n_prompt + OUTPUT_COST * record.n_output


def _clients(logs: Logs) -> list[str | None]:
    """Those who sent most, by name."""
    counts: dict[str | None, int] = {}
    for log in logs.values():
        for record in log:
            counts[record.client] = counts.get(record.client, 0) + 1
    first = sorted(counts, key=lambda client: -counts[client])[:MAX_CLIENTS]
    return sorted(first, key=str)
