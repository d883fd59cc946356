"""The lines above a table: what was measured, with what, where, by which command."""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_raw.lab.bench.result import Result
from pyllama_raw.lab.bench.table import point_of, round_of, short_names

CAPTION = "medians over rounds; tok/s of output, and its ratio to the first target of its run; latencies in ms"


def headline(results: Sequence[Result]) -> list[str]:
    """
    Workload and model, versions, machine, command; what is not known is left out.

    Of results of several runs it has the versions, machine and command of each, once.
    """
    n_rounds = len(set(map(round_of, results)))
    points = list(dict.fromkeys(map(point_of, results)))
    measured = [
        _all(results, "workload") or "benchmark",
        _all(results, "model_id"),
        f"{n_rounds} round{'s' * (n_rounds != 1)}",
        points[0] if len(points) == 1 else "",
    ]
    lines = [", ".join(filter(None, measured))]
    lines += [line for result in results for line in _run_lines(result)]
    names = short_names(result["target"] for result in results)
    for target, short in names.items():
        if short != target:
            lines.append(f"{short}: {target.partition('=')[2] or target}")
    return list(dict.fromkeys(filter(None, lines)))


def _all(results: Sequence[Result], key: str) -> str:
    """The values that *results* have of *key*."""
    values = dict.fromkeys(str(result[key]) for result in results if key in result)
    return " and ".join(values)


def _run_lines(result: Result) -> list[str]:
    """On which machine, when and by which command."""
    facts = {k: v for k, v in result.get("machine", {}).items() if v and k != "date"}
    words = [
        f"{k} {', '.join(v) if isinstance(v, list) else v}" for k, v in facts.items()
    ]
    moment = str(result.get("date", ""))
    return [", ".join(filter(None, [*words, moment])), result.get("command", "")]
