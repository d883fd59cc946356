"""Times of requests, and the clients that were served; from request logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib.figure import Figure

from pyllama_raw.core.policies.vtc import OUTPUT_COST
from pyllama_raw.engine.request_log import RequestRecord
from pyllama_raw.lab.plot.style import canvas, cdf, cdfs, legend, look

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
