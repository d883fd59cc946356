"""
Results as a person reads them: what was measured and how, then a table.

The table has a line for each target and point, with medians over rounds. A ratio is that of one
round, target to the first target of its run; the median of the rounds is shown with the smallest
and the largest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.result import Result
from pyllama_raw.lab.table import Row, digits
from pyllama_raw.options.machine import MAX_OTHERS

CAPTION = "medians over rounds; tok/s of output, and its ratio to the first target of its run; latencies in ms"
# Of each line: heading and key. Latencies are in ms. The first is what a ratio is of.
WIDE = {
    "tok/s": "output_throughput",
    "all tok/s": "total_token_throughput",
    "req/s": "request_throughput",
    "good req/s": "request_goodput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "decode tok/s": "median_decode_tok_per_s",
    "TPOT p50": "median_tpot_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
    "ITL max": "max_itl_ms",
    "E2EL p99": "p99_e2el_ms",
    "queue p99": "p99_queue_ms",
    "cached": "cached_share",
    "RSS MiB": "peak_rss_bytes",
    "CPU s": "cpu_s",
    "others CPUs": "others_cpus",
}
MAIN = ("tok/s", "TTFT p50", "TTFT p99", "ITL p99", "ITL max")
FACTORS = {"peak_rss_bytes": 2.0**-20}  # to the unit of the heading
RATIO = "output_throughput"
RATIO_HEADING = "ratio min-max"
MAX_REASONS = 3  # shown for a target and point


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


def groups(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by point and target; the rounds of one are in their order."""
    runs: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        runs.setdefault((point_of(result), result["target"]), []).append(result)
    return runs


def round_of(result: Result) -> tuple[object, int]:
    """The run and its round: rounds of two runs have nothing in common."""
    return result.get("date"), result["round"]


def point_of(result: Result) -> str:
    """The way that calls were sent, in words."""
    sending = _sending(result)  # first: it raises for what is no result
    n_prompt = result.get("prompt_tokens")  # results of earlier versions have none
    return sending + (f", prompts of {n_prompt}" if n_prompt else "")


def _sending(result: Result) -> str:
    clients = result["max_concurrency"]
    if clients is not None:
        return f"{clients} client{'s' * (clients != 1)}"
    if result["request_rate"] is not None:
        burstiness = result["burstiness"]
        shape = "" if burstiness == 1 else f", burstiness {burstiness:g}"
        return f"{result['request_rate']:g}/s{shape}"
    return "own times"


def short_names(targets: Iterable[str]) -> dict[str, str]:
    """Targets by their kind, which has a number where there are several of it."""
    targets = list(dict.fromkeys(targets))
    kinds = [target.partition("=")[0] for target in targets]
    return {
        target: kind
        if kinds.count(kind) == 1
        else f"{kind}-{kinds[: i + 1].count(kind)}"
        for i, (target, kind) in enumerate(zip(targets, kinds, strict=True))
    }


def rows(results: Sequence[Result], *, wide: bool = False) -> list[Row]:
    """
    Lines of the table; columns without any value are left out.

    So is how calls were sent if that is the same in all: then the headline has it.
    """
    runs_of = groups(results)
    points = {point for point, _ in runs_of}
    names = short_names(result["target"] for result in results)
    firsts: dict[str, str] = {}
    for result in results:
        firsts.setdefault(result.get("apart", ""), result["target"])
    lines: list[Row] = []
    for (point, target), runs in runs_of.items():
        line: dict[str, object] = {"target": names[target]}
        if len(points) > 1:
            clients = runs[0]["max_concurrency"]
            line |= (
                {"sent": _sending(runs[0])} if clients is None else {"clients": clients}
            )
            if n_prompt := runs[0].get("prompt_tokens"):
                line["prompt"] = n_prompt
        for heading in WIDE if wide else MAIN:
            key = WIDE[heading]
            value = middle(runs, key)
            if value is not None:
                line[heading] = value * FACTORS.get(key, 1.0)
            if key == RATIO and len(names) > len(firsts):
                first = firsts[runs[0].get("apart", "")]
                below = runs_of.get((point, first), []) if target != first else []
                line[RATIO_HEADING] = spread(ratios(runs, below, RATIO))
        line["failed"] = sum(run.get("failed", 0) for run in runs)
        if n_busy := sum(most_busy([run]) is not None for run in runs):
            line["busy"] = f"{n_busy}/{len(runs)}"
        lines.append(line)
    return lines


def middle(runs: Iterable[Result], key: str) -> float | None:
    """The median over rounds; None if no round has a value."""
    values = [run[key] for run in runs if run.get(key) is not None]
    return median(values) if values else None


def ratios(above: list[Result], below: list[Result], key: str) -> list[float]:
    """Ratios within rounds that both have."""
    values = {round_of(run): run[key] for run in below}
    return [
        run[key] / values[round_of(run)]
        for run in above
        if values.get(round_of(run)) and run[key] is not None
    ]


def spread(values: Sequence[float]) -> str:
    """Median, smallest and largest."""
    if not values:
        return ""
    texts = [digits(value) for value in (median(values), min(values), max(values))]
    return "{} {}-{}".format(*texts)


def most_busy(results: Iterable[Result]) -> float | None:
    """CPUs that others used in the busiest round; None if they were few enough."""
    busiest = max((run.get("others_cpus") or 0.0 for run in results), default=0.0)
    return busiest if busiest > MAX_OTHERS else None


def failures(results: Sequence[Result]) -> list[str]:
    """Reasons of calls that have failed, as lines: for each target and point, commonest first."""
    lines = []
    names = short_names(result["target"] for result in results)
    for (point, target), runs in groups(results).items():
        where = f"failed, {names[target]}, {point}"
        reasons = Counter(
            error for run in runs for error in run.get("errors", ()) if error
        )
        n_failed = reasons.total()
        n_calls = sum(len(run.get("errors", ())) for run in runs)
        for reason, count in reasons.most_common(MAX_REASONS):
            lines.append(f"{where}: {count} of {n_calls}: {reason}")
            n_failed -= count
        if n_failed:
            lines.append(f"{where}: {n_failed} for other reasons")
    return lines


def read_results(path: Path) -> list[Result]:
    """
    The results in a file, one object a line.

    Raises:
        ConfigError: a line is no result.
    """
    results: list[Any] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            result = json.loads(line)
            groups([result])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: no result: {error!r}") from error
        results.append(result)
    if not results:
        raise ConfigError(f"{path}: no results in it")
    return results
