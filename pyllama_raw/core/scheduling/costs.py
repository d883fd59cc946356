"""
What a step takes here: a formula for its seconds, learned from the steps themselves.

1. A step takes a fixed time, because all weights are read, and a time for each row. A row whose
   logits are computed takes more. Products are often cheaper a row from some number of rows on, or,
   on a GPU, free below it; that number is the *knee*.
2. Steps are sorted by their size and by whether they have prompts. Of each such *bin* the latest
   steps are remembered, and the median of these counts, so a disturbed step changes nothing. A bin
   counts less when it has few steps or old ones.
3. The formula is the least squares fit to the bins, by relative errors, in which nothing costs less
   than nothing. A step of one size alone says nothing of the fixed time, so it is taken to be none.
4. A knee has to explain what a line cannot: it must halve the error at least.

Equal histories give equal formulas. Memory is that of all bins, however many steps there were.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf

RING = 15  # steps that a bin remembers
EAGER = 16  # so many steps are each learned from at once
REFIT = 32  # steps between two fits afterwards
FADE = 256  # steps after which a bin without new ones counts half
KNEES = (0, 8, 16, 32, 64, 128)  # rows; 0: none
MIN_GAIN = 0.5  # of the error, that a knee may leave
RIDGE = 1e-6  # pulls towards no cost; the cost of a row is pulled least of all
LEAST_S = 1e-9  # a fit never says that a step takes nothing


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step as a formula of its rows."""

    fixed_s: float
    """Of a step, however small."""
    row_s: float
    """Of each row up to the knee."""
    output_s: float
    """More for a row whose logits are computed."""
    knee: int
    """Rows from which on one costs `wide_row_s`; 0: all cost the same."""
    wide_row_s: float
    """Of each row beyond the knee."""

    def seconds(self, n_rows: int, n_outputs: int = 0) -> float:
        """Seconds of a step with *n_rows*, of which *n_outputs* have logits."""
        n_narrow = min(n_rows, self.knee) if self.knee else n_rows
        by_rows_s = self.row_s * n_narrow + self.wide_row_s * (n_rows - n_narrow)
        return max(self.fixed_s + by_rows_s + self.output_s * n_outputs, LEAST_S)

    def n_rows(self, seconds: float, n_outputs: int = 0) -> float:
        """The rows that a step of *seconds* may have; infinite where a row costs nothing."""
        left_s, n_narrow, each_s = (
            seconds - self.fixed_s - self.output_s * n_outputs,
            0,
            self.row_s,
        )
        # The knee is behind: each further row costs what wide ones do.
        if self.knee and left_s > self.row_s * self.knee:
            left_s -= self.row_s * self.knee
            n_narrow, each_s = self.knee, self.wide_row_s
        if left_s <= 0:
            return 0.0
        return n_narrow + left_s / each_s if each_s else inf

    def n_worth(self, n_decodes: int, worth_s: float, loss: float) -> float:
        """
        The least rows of a step whose prompts lose *loss* of their best pace; or infinite.

        Args:
            n_decodes: rows with logits in it, beside those of the prompts.
            worth_s: the seconds that these rows are worth elsewhere.
        """
        if not self.wide_row_s:
            return inf
        # What the prompts pay besides their rows, on both sides of the knee.
        extra_s = self.seconds(n_decodes, n_decodes) - worth_s
        if not n_decodes:
            extra_s = self.fixed_s
        n_narrow = max(self.knee - n_decodes, 0)
        wide_extra_s = extra_s + (self.row_s - self.wide_row_s) * n_narrow
        # The best pace is that of an endless step, or that at the knee.
        row_s = self.wide_row_s
        if n_narrow:
            row_s = min(row_s, max(extra_s / n_narrow, 0.0) + self.row_s)
        row_s /= 1 - loss
        if self.row_s < row_s and extra_s <= (row_s - self.row_s) * n_narrow:
            return n_decodes + max(extra_s, 0.0) / (row_s - self.row_s)
        return n_decodes + max(wide_extra_s, 0.0) / (row_s - self.wide_row_s)


class _Bin:
    """The latest steps of about one size."""

    __slots__ = ("latest", "steps")

    def __init__(self) -> None:
        self.steps: list[tuple[float, int, int, float]] = []  # seconds a row, then all
        self.latest = 0  # the number of the newest step


class CostHistory:
    """
    Learns a StepCost from steps as they come.

    Attributes:
        cost: the formula; None before the first step.
    """

    def __init__(self) -> None:
        self.cost: StepCost | None = None
        self._bins: dict[tuple[int, bool], _Bin] = {}
        self._n_steps = 0

    def observe(self, n_rows: int, n_outputs: int, seconds: float) -> None:
        """Learn from a step of *n_rows*, of which *n_outputs* had logits."""
        if n_rows < 1 or seconds < LEAST_S:
            return
        self._n_steps += 1
        # Two bins an octave: one step is at most half as large again as another of its bin.
        n_bits = n_rows.bit_length()
        size = 2 * n_bits + (n_rows >> max(n_bits - 2, 0) & 1)
        key = (size, n_outputs < n_rows)
        steps_of = self._bins.get(key)
        if steps_of is None:
            steps_of = self._bins[key] = _Bin()
        steps_of.latest = self._n_steps
        steps_of.steps.append((seconds / n_rows, n_rows, n_outputs, seconds))
        del steps_of.steps[:-RING]
        if self._n_steps <= EAGER or self._n_steps % REFIT == 0:
            self.cost = self._fit()

    def _fit(self) -> StepCost:
        """The formula that fits best."""
        points = []
        for steps_of in self._bins.values():
            steps = sorted(steps_of.steps)
            _, n_rows, n_outputs, seconds = steps[(len(steps) - 1) // 2]
            age = self._n_steps - steps_of.latest
            weight = len(steps) / (1 + age / FADE) / (seconds * seconds)
            points.append((n_rows, n_outputs, seconds, weight))
        best, least = None, 0.0
        for knee in KNEES:
            sizes = {n_rows > knee for n_rows, *_ in points}
            # A knee needs steps on both sides, and more of them than it has freedom.
            if knee and (len(sizes) < 2 or len(points) < len(KNEES)):
                continue
            cost, error = _least_squares(points, knee)
            if best is None or error < least * MIN_GAIN:
                best, least = cost, error
        assert best is not None
        return best


def _least_squares(
    points: Items[tuple[int, int, float, float]], knee: int
) -> tuple[StepCost, float]:
    """The fit with that knee, and its error; what would cost less than nothing is left out."""
    # Sums of products of the features 1, narrow rows, outputs, wide rows, and of the seconds.
    sums = [[0.0] * 5 for _ in range(5)]
    for n_rows, n_outputs, seconds, weight in points:
        n_narrow = min(n_rows, knee) if knee else n_rows
        features = (1.0, n_narrow, n_outputs, n_rows - n_narrow, seconds)
        for line, feature in zip(sums, features, strict=True):
            factor = weight * feature
            for j, other in enumerate(features):
                line[j] += factor * other
    used = [0, 1, 2, 3] if knee else [0, 1, 2]
    while True:
        matrix = [[*(sums[i][j] for j in used), sums[i][4]] for i in used]
        # Each cost is pulled to zero by what it could explain, so units do not matter.
        for place, index in enumerate(used):
            ridge = RIDGE if index != 1 else RIDGE**2
            matrix[place][place] += ridge * sums[index][index] or 1.0
        values = dict.fromkeys(range(4), 0.0)
        values.update(zip(used, _solve(matrix), strict=True))
        lowest = min(used, key=lambda i: values[i] * sums[i][i] ** 0.5)
        if values[lowest] >= 0:
            break
        used.remove(lowest)
    # The squares of what is left, by the sums alone.
    error = sums[4][4]
    for i in used:
        error -= values[i] * (
            2 * sums[i][4] - sum(values[j] * sums[i][j] for j in used)
        )
    wide_s = values[3] if knee else values[1]
    return StepCost(values[0], values[1], values[2], knee, wide_s), max(error, 0.0)


def _solve(matrix: list[list[float]]) -> list[float]:
    """The solution of a positive definite system, whose right side is the last column."""
    for i, pivot in enumerate(matrix):
        # Every other line loses its part of this unknown.
        for line in matrix:
            if line is not pivot:
                factor = line[i] / pivot[i]
                line[i:] = [
                    x - factor * y for x, y in zip(line[i:], pivot[i:], strict=True)
                ]
    return [line[-1] / line[i] for i, line in enumerate(matrix)]
