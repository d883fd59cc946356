"""
Results as a table: a line for each target and point, medians over rounds.

A ratio is that of one round, target to the first target; the median of the rounds is
shown with the smallest and the largest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pyllama_raw.bench.host import MAX_OTHERS
from pyllama_raw.bench.result import Result
from pyllama_raw.errors import ConfigError

# Of each line: heading, key, factor to the unit of the heading.
COLUMNS = (
    ("tok/s", "total_token_throughput", 1.0),
    ("out tok/s", "output_throughput", 1.0),
    ("req/s", "request_throughput", 1.0),
    ("good req/s", "request_goodput", 1.0),
    ("TTFT p50 s", "median_ttft_ms", 1e-3),
    ("TTFT p99 s", "p99_ttft_ms", 1e-3),
    ("TPOT ms", "median_tpot_ms", 1.0),
    ("ITL p50 ms", "median_itl_ms", 1.0),
    ("ITL p99 ms", "p99_itl_ms", 1.0),
    ("ITL max ms", "max_itl_ms", 1.0),
    ("queue p99 s", "p99_queue_ms", 1e-3),
    ("cached", "cached_share", 1.0),
    ("RSS MiB", "peak_rss_bytes", 2.0**-20),
    ("CPU s", "cpu_s", 1.0),
    ("failed", "failed", 1.0),
    ("others CPUs", "others_cpus", 1.0),
)
RATIO = "output_throughput"
MAX_REASONS = 3  # shown for a target and point

Row = Mapping[str, object]


def groups(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by point and target; the rounds of one are in their order."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        found.setdefault((point_of(result), result["target"]), []).append(result)
    return found


def point_of(result: Result) -> str:
    """How the calls were sent, in words."""
    if result["max_concurrency"] is not None:
        return f"{result['max_concurrency']} clients"
    if result["request_rate"] is not None:
        return f"{result['request_rate']:g}/s, burstiness {result['burstiness']:g}"
    return "own times"


def rows(results: Sequence[Result]) -> list[Row]:
    """Lines of the table; columns without any value are left out."""
    found = groups(results)
    first = results[0]["target"] if results else ""
    lines: list[Row] = []
    for (point, target), runs in found.items():
        line: dict[str, object] = {"target": target, "sent": point}
        line |= {
            heading: value * factor
            for heading, key, factor in COLUMNS
            if (value := middle(runs, key)) is not None
        }
        if target != first and (point, first) in found:
            line["out tok/s ratio"] = spread(ratios(runs, found[point, first], RATIO))
        lines.append(line)
    return lines


def middle(runs: Iterable[Result], key: str) -> float | None:
    """The median over rounds; None if no round has a value."""
    values = [run[key] for run in runs if run.get(key) is not None]
    return median(values) if values else None


def ratios(above: list[Result], below: list[Result], key: str) -> list[float]:
    """Ratios within rounds that both have."""
    others = {run["round"]: run[key] for run in below}
    return [
        run[key] / others[run["round"]]
        for run in above
        if others.get(run["round"]) and run[key] is not None
    ]


def spread(values: Sequence[float]) -> str:
    """Median, smallest and largest."""
    if not values:
        return ""
    return f"{median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def most_busy(results: Iterable[Result]) -> float | None:
    """CPUs that others used in the busiest round; None if they were few enough."""
    busiest = max((run.get("others_cpus") or 0.0 for run in results), default=0.0)
    return busiest if busiest > MAX_OTHERS else None


def failures(results: Sequence[Result]) -> list[str]:
    """Why calls have failed, as lines: for each target and point, commonest first."""
    lines = []
    for (point, target), runs in groups(results).items():
        reasons = Counter(
            error for run in runs for error in run.get("errors", ()) if error
        )
        n_failed, n_calls = (
            reasons.total(),
            sum(len(run.get("errors", ())) for run in runs),
        )
        for reason, count in reasons.most_common(MAX_REASONS):
            lines.append(f"failed, {target}, {point}: {count} of {n_calls}: {reason}")
            n_failed -= count
        if n_failed:
            lines.append(f"failed, {target}, {point}: {n_failed} for other reasons")
    return lines


def table(lines: Sequence[Row]) -> list[str]:
    """Lines of text with aligned columns."""
    columns = columns_of(lines)
    cells = [columns, *([cell(line.get(c, "")) for c in columns] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in cells
    ]


def columns_of(lines: Iterable[Row]) -> list[str]:
    """Every column that a line has, in the order they come."""
    return list(dict.fromkeys(name for line in lines for name in line))


def cell(value: object) -> str:
    """A number with four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
