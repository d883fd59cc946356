"""
Results as a person reads them: a table, and what has changed between two files of results.

The table has a line for each target and point, with medians over rounds. A ratio is that of one
round, target to the first target of its run; the median of the rounds is shown with the smallest
and the largest.

Rules of a comparison:
1. A figure has one value a round. The rounds of both files are ranked together; the exact
   two-sided Mann-Whitney test says how likely such ranks are by chance.
2. A change counts if that is at most 1 %, and the medians are further apart than the
   threshold. With 5 rounds on each side that means: no round of one is among those of the
   other. Fewer than 5 rounds cannot show it and are called too few.
3. Failures need no test: more of them is worse.
4. Nothing is proven, whatever the ranks say, if another process used the CPUs in a round,
   or if the files are of other models or workloads, or one of them of several conditions.

Rounds show the noise within a run. They do not show a machine that was slower all along:
take both results in one quiet hour, or measure both as targets of one run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb, floor, isfinite, log10
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.calls import Result, conditions_of, labels_of
from pyllama_raw.options.machine import MAX_OTHERS

Row = Mapping[str, object]


def table(lines: Sequence[Row]) -> list[str]:
    """Lines of text, a column for every key: words to the left, the rest to the right."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    cells = [columns, *([_cell(line.get(c, "")) for c in columns] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_word = [all(_is_word(line.get(c, "")) for line in lines) for c in columns]
    return [
        "  ".join(
            text.ljust(width) if word else text.rjust(width)
            for text, width, word in zip(line, widths, is_word, strict=True)
        ).rstrip()
        for line in cells
    ]


def _is_word(value: object) -> bool:
    return isinstance(value, str) and not value[:1].isdigit()


def _cell(value: object) -> str:
    """A measured number with three digits, anything else as it is."""
    return digits(value) if isinstance(value, float) else str(value)


def digits(value: float) -> str:
    """*value* with three significant digits and no exponent."""
    if not isfinite(value) or not value:
        return f"{value:g}"
    n_decimals = 2 - floor(log10(abs(value)))
    rounded = round(value, n_decimals)
    return f"{rounded:.{max(2 - floor(log10(abs(rounded))), 0)}f}"


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
            reason = (
                f"{error} is missing" if isinstance(error, KeyError) else repr(error)
            )
            allowed = "give what `bench run --out` wrote"
            raise ConfigError(
                f"{path}, line {number}: no result ({reason}): {allowed}"
            ) from error
        results.append(result)
    if not results:
        raise ConfigError(f"{path}: no results in it")
    return results


MAX_CHANCE = 0.01

# Figures that are compared: more of these is better, less of the others.
BETTER_IF_MORE = {"total_token_throughput", "output_throughput", "request_throughput"}
BETTER_IF_MORE |= {"request_goodput", "cached_share"}
FIGURES = [key for key in WIDE.values() if key != "others_cpus"]
NOT_CONDITIONS = {
    *("machine.date", "machine.commit", "options.targets"),
    *("options.request_log", "options.step_log", "options.out"),
}

Verdict = Literal["better", "worse", "equal", "noise", "too few rounds"]


def changes(
    before: Sequence[Result], after: Sequence[Result], threshold: float
) -> list[Row]:
    """
    Every figure that both have, by target and point, as lines of a table.

    Args:
        threshold: part of the median that a change has to exceed.
    """
    old, new = groups(before), groups(after)
    lines = []
    for key in old:
        for figure in ("failed", *FIGURES):
            a = _values(old[key], figure)
            b = _values(new.get(key, []), figure)
            if a and b:
                lines.append(_change(key, figure, a, b, threshold))
    return lines


def _values(runs: Sequence[Result], figure: str) -> list[float]:
    return [run[figure] for run in runs if run.get(figure) is not None]


def _change(
    key: tuple[str, str],
    figure: str,
    a: list[float],
    b: list[float],
    threshold: float,
) -> Row:
    if figure == "failed":
        before, after, chance = float(sum(a)), float(sum(b)), 1.0
        growth = after / len(b) - before / len(a)
        verdict: Verdict = "worse" if growth > 0 else "noise" if growth < 0 else "equal"
    else:
        before, after, chance = float(median(a)), float(median(b)), mann_whitney(a, b)
        verdict = judge(
            a, b, chance, threshold, more_is_better=figure in BETTER_IF_MORE
        )
    change = f"{after / before - 1:+.1%}" if before else "from 0"
    return {
        "target": key[1],
        "sent": key[0],
        "figure": figure,
        "before": before,
        "after": after,
        "change": change if before != after else "0",
        "chance": f"{chance:.2g}",
        "verdict": verdict,
    }


def judge(
    a: Sequence[float],
    b: Sequence[float],
    chance: float,
    threshold: float,
    *,
    more_is_better: bool,
) -> Verdict:
    """Rule 2; what has one value in all rounds of both needs no rounds."""
    if len({*a, *b}) == 1:
        return "equal"
    if 2 / comb(len(a) + len(b), len(a)) > MAX_CHANCE:  # that of complete separation
        return "too few rounds"
    difference = median(b) - median(a)
    if chance > MAX_CHANCE or abs(difference) <= threshold * abs(median(a)):
        return "noise"
    return "better" if (difference > 0) == more_is_better else "worse"


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """
    The chance that *a* and *b*, drawn from one distribution, are ranked as far apart.

    Exact and two-sided. Of equal values each counts half for both sides.
    """
    wins = sum((x > y) + (x == y) / 2 for x in a for y in b)
    fewer = int(min(wins, len(a) * len(b) - wins) + 0.5)  # a tie never adds proof
    ways = _ways(len(a), len(b))
    return min(2 * sum(ways[: fewer + 1]) / comb(len(a) + len(b), len(a)), 1.0)


def _ways(n: int, m: int) -> list[int]:
    """In how many orders of n and m values there are u pairs won, for each u."""
    # Coefficients of the Gaussian binomial: multiply by 1 - q^(m+i), divide by 1 - q^i.
    ways = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            ways[u] -= ways[u - m - i]
        for u in range(i, n * m + 1):
            ways[u] += ways[u - i]
    return ways


def doubts(before: Sequence[Result], after: Sequence[Result]) -> list[str]:
    """Rule 4: why nothing is proven, as lines; none if it is."""
    lines = []
    for key, name in (("model_id", "models"), ("workload", "workloads")):
        a, b = ({str(run.get(key)) for run in runs} for runs in (before, after))
        if a != b:
            listing = " and ".join(", ".join(sorted(kinds)) for kinds in (a, b))
            lines.append(f"other {name}: {listing}")
    for which, runs in (("first", before), ("second", after)):
        if len(labels := sorted(set(labels_of(runs)))) > 1:
            listing = "; ".join(labels)
            lines.append(f"runs of several conditions in the {which}: {listing}")
    busiest = most_busy([*before, *after])
    if busiest is not None:
        lines.append(f"other processes used up to {busiest:.2f} CPUs")
    return lines


def differing(before: Result, after: Result) -> list[str]:
    """Conditions that are not the same, as lines."""
    a, b = conditions_of(before), conditions_of(after)
    names = [name for name in dict.fromkeys([*a, *b]) if name not in NOT_CONDITIONS]
    pairs = [(name, a.get(name), b.get(name)) for name in names]
    return [f"{name}: {x} and {y}" for name, x, y in pairs if x != y]
