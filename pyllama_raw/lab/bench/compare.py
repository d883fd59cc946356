"""
Two results of the same workload: what has changed, and what is noise.

Rules:
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

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import Literal

from pyllama_raw.lab.bench.conditions import conditions_of, labels_of
from pyllama_raw.lab.bench.report import WIDE, groups, most_busy
from pyllama_raw.lab.bench.result import Result
from pyllama_raw.lab.table import Row

MAX_CHANCE = 0.01

# Figures that are compared: more of these is better, less of the others.
MORE = {"total_token_throughput", "output_throughput", "request_throughput"}
MORE |= {"request_goodput", "cached_share"}
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
        verdict = judge(a, b, chance, threshold, more_is_better=figure in MORE)
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
