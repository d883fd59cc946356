"""From files to pictures: what a file is, is told by its first line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from pyllama_raw.engine.request_log import RequestRecord, read_requests
from pyllama_raw.engine.step_log import read_steps
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.table import read_results
from pyllama_raw.lab.plot import requests, timeline
from pyllama_raw.lab.plot.bench import figures as of_bench
from pyllama_raw.lab.plot.bench import write_plots
from pyllama_raw.lab.plot.style import STYLE
from pyllama_raw.lab.sim.figures import Figures


class Pictures(dict[str, Figure]):
    """Figures by name."""

    def save(self, folder: Path) -> None:
        """Each as NAME.svg and NAME.png."""
        write_plots(self, folder)

    def _repr_html_(self) -> str:
        """All of them, one below the other."""
        return "\n".join(map(_svg, self.values()))


def pictures(*paths: Path) -> Pictures:
    """
    What can be drawn of step logs, request logs and results of `bench`.

    The name of a request log is that of its line: `fcfs.jsonl`, or `fcfs@2.jsonl` for one of
    several rates.

    Raises:
        ConfigError: a file is none of these, or there is nothing in it to be seen.
    """
    steps: dict[str, list[StepRecord]] = {}
    logs: dict[str, list[RequestRecord]] = {}
    results: list[Any] = []
    for path in paths:
        try:
            keys = _keys(path)
            if "n_prefill" in keys:
                steps[path.stem] = read_steps(path)
            elif "submitted_s" in keys:
                counted = [r for r in read_requests(path) if not r.warms_up]
                logs |= {path.stem: counted} if counted else {}
            else:
                results += read_results(path)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no log and no result: {error}") from error
    with rc_context(STYLE):
        drawn = _of_steps(steps) | _of_logs(logs)
    found = drawn | (of_bench(results) if results else {})
    known = {name: figure for name, figure in found.items() if figure is not None}
    if not known:
        raise ConfigError("there is nothing in these files to be seen")
    return Pictures(known)


def compared(results: Sequence[Figures]) -> Pictures:
    """The latencies of simulations, a line for each policy."""
    ttft = {result.name: result.ttft_s for result in results}
    e2e = {result.name: result.e2e_s for result in results}
    with rc_context(STYLE):
        figure = requests.cdfs({"TTFT": ttft, "E2E": e2e})
    return Pictures({} if figure is None else {"compared": figure})


def _keys(path: Path) -> set[str]:
    with path.open() as file:
        line = file.readline()
    try:
        row = json.loads(line)
    except ValueError:
        return set()  # a JSON file of several lines
    return set(row) if isinstance(row, dict) else set()


def _of_steps(steps: dict[str, list[StepRecord]]) -> dict[str, Figure | None]:
    found: dict[str, Figure | None] = {}
    for name, log in steps.items():
        found[f"{name}-slots"] = timeline.gantt(log)
        found[f"{name}-load"] = timeline.load(log)
    return found


def _of_logs(logs: dict[str, list[RequestRecord]]) -> dict[str, Figure | None]:
    if not logs:
        return {}
    return {
        "latency-cdf": requests.latency_cdf(logs),
        "goodput": requests.goodput(logs),
        "fairness": requests.fairness(logs),
    }


def _svg(figure: Figure) -> str:
    text = StringIO()
    with rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
