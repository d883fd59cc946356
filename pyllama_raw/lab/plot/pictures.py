"""From files to pictures: what a file is, is told by its first line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from pyllama_raw.core.policies.vtc import OUTPUT_COST
from pyllama_raw.engine.logs import RequestRecord, read_records
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.report import read_results
from pyllama_raw.lab.plot.bench import figures as of_bench
from pyllama_raw.lab.plot.style import STYLE, canvas, cdf, cdfs, legend, look
from pyllama_raw.lab.sim.run import Figures

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
        drawings = _of_logs(logs) | (of_bench(results) if results else {})
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
