"""
What a step takes here: a formula for its seconds, learned from the steps themselves; the budget
of tokens that follows from it; and what copies of slots may take of it.

1. A step takes a fixed time, because all weights are read, and a time for each row. A row whose
   logits are computed takes more. Products are often cheaper a row from some number of rows on, or,
   on a GPU, free below it; that number is the *knee*.
2. Steps are sorted by their size and by whether they have prompts. Of each such *bin* the latest
   steps are remembered, and the median of these counts, so a disturbed step changes nothing. A bin
   counts less when it has few steps or old ones.
3. The formula is the least squares fit to the bins, by relative errors, in which nothing costs less
   than nothing. A step of one size alone says nothing of the fixed time, so it is taken to be none.
4. Logits are believed to cost little until many steps say otherwise. The first steps have few of
   them, and what disturbs such a step would else be the price of its logits.
5. A knee has to explain what a line cannot: it must halve the error at least.

Equal histories give equal formulas. Memory is that of all bins, however many steps there were.

A state is read from a device by copies that each take microseconds, however small. There is at
least one for each layer and each *run* of cells that lie side by side; without flash attention
values lie transposed, and there are hundreds. So `CopyPrice` is measured by small copies when the
context is made, before a large one is paid for. It is an estimate: a small copy says little of a
large one, and a busy machine makes it look dear. So the first captures are small, and later ones
are as large as the observed ones allow; where none is allowed a small one is tried now and then.

What was never measured is taken to pay, so that it is. A restore is judged by the fastest
one of its tier: a slow one says something about the moment, and a tier that is never used
could not be measured again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

RING = 15  # steps that a bin remembers
NEWS = 8  # an eighth more steps make another fit, because early ones say most
MAX_NEWS = 32  # steps, at most, between two fits
FADE = 256  # steps after which a bin without new ones counts half
KNEES = (0, 8, 16, 32, 64, 128)  # rows; 0: none
MIN_GAIN = 0.5  # of the error, that a knee may leave
MIN_POINTS = 6  # bins without which there is no knee
DOUBT = 0.1  # of the seconds of a step, by which one is off as a rule
RIDGE = 1e-6  # pulls towards no cost; the cost of a row is pulled least of all
MIN_OBSERVED = 16  # rows of a step that says how fast prompts are
SMOOTHING = 0.25  # weight of the newest one
MAX_AGE = 1024  # steps after which what those of one size took is not trusted
LEAST_S = 1e-9  # a fit never says that a step takes nothing

FIRST_BUDGET = 64  # before anything was measured
GOAL_S = 0.1  # of a step that streams wait for, unless the target is another
LEAST_FACTOR = 2  # times its fixed time, that such a step takes at least
IDLE_FACTOR = 4  # times the goal, of a step that stalls no stream
BURST_FACTOR = 16  # the same, of one that ends all prompts
GROWTH = 4  # times the rows of the largest step that was seen
IDLE_GROWTH = 8  # the same, of a step that stalls no stream
GRAIN = 16  # matrix kernels like multiples

FREE_S = 0.001  # a copy that takes less is not weighed: any step takes as long
SHARE = 0.5  # of `target_step_s`, the most that captures take of a step that others wait for
SLACK = 0.1  # of `target_step_s`, by which a step may be longer
CHUNK = 64  # tokens of a prompt in one run of cells, as a rule
MIN_PART = 16  # tokens; a smaller beginning is not worth a search
COPY_GROWTH = 4  # of what a step captures, over the largest capture that was observed
COPY_DOUBT = (
    0.1  # of the seconds of a small copy, by which a token's price may be wrong
)
N_PROBED = 2  # tokens of a small copy
RELIEF = 0.9  # of the highest price, after a capture that it forbids
SLOW_RELIEF = 0.975  # of the lowest one, as long as it is not confirmed
MIN_OBSERVED_COPIES = 2  # that confirm it
MAX_REFUSALS = 16  # captures that do not pay before a small one is tried
ALONE = 10  # times `target_s`, what a trial may take where nobody waits
LEAST_TOKEN_S = 1e-9  # less is a price of 0
MIN_BYTES_PER_S = 2**30  # of a copy to fresh memory


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
        left_s = seconds - self.fixed_s - self.output_s * n_outputs
        n_narrow, each_s = 0, self.row_s
        # The knee is behind: each further row costs what wide ones do.
        if self.knee and left_s > self.row_s * self.knee:
            left_s -= self.row_s * self.knee
            n_narrow, each_s = self.knee, self.wide_row_s
        if left_s <= 0:
            return 0.0
        return n_narrow + left_s / each_s if each_s else inf


# Steps of about one size: seconds a row, rows, rows with logits, seconds.
Bin = deque[tuple[float, int, int, float]]


class CostHistory:
    """
    Learns a StepCost from steps as they come, and the speed of prompts.

    Attributes:
        cost: the formula; None before the first step.
        largest: the most rows that a step had; beyond them the formula is a guess.
        tokens_per_s: of steps with prompts, on average; None before the first one.
    """

    def __init__(self) -> None:
        self.cost: StepCost | None = None
        self.largest = 0
        self.tokens_per_s: float | None = None
        self._bins: dict[tuple[int, bool], Bin] = {}
        self._latest: dict[tuple[int, bool], int] = {}  # the newest step of each
        # Steps all of whose rows have logits, by their rows: the latest seconds; what they take
        # undisturbed, and the newest step. A bin has several sizes, and would forget a rare one
        # beside a frequent one.
        self._decodes: dict[int, tuple[deque[float], float, int]] = {}
        self._n_steps = 0
        self._next_fit = 0  # the step that is to be learned from

    def observe(self, n_rows: int, n_outputs: int, seconds: float) -> None:
        """Learn from a step of *n_rows*, of which *n_outputs* had logits."""
        if n_rows < 1 or seconds < LEAST_S:
            return
        # Small steps are bound by memory, not by tokens.
        if n_rows >= MIN_OBSERVED and n_outputs < n_rows:
            speed, mean = n_rows / seconds, self.tokens_per_s
            change = SMOOTHING * (speed - mean) if mean is not None else 0.0
            self.tokens_per_s = speed if mean is None else mean + change
        self.largest = max(self.largest, n_rows)
        self._n_steps += 1
        # Two bins an octave: one step is at most half as large again as another of its bin.
        n_bits = n_rows.bit_length()
        size = 2 * n_bits + (n_rows >> max(n_bits - 2, 0) & 1)
        key = (size, n_outputs < n_rows)
        steps = self._bins.setdefault(key, deque(maxlen=RING))
        steps.append((seconds / n_rows, n_rows, n_outputs, seconds))
        self._latest[key] = self._n_steps
        if n_outputs == n_rows:
            decodes = self._decodes.get(n_rows, (deque[float](maxlen=RING),))[0]
            decodes.append(seconds)
            # What disturbs a step makes it longer, and often by more than a row costs.
            step_s = sorted(decodes)[(len(decodes) - 1) // 4]
            self._decodes[n_rows] = decodes, step_s, self._n_steps
        if self._n_steps < self._next_fit:
            return
        self._next_fit = self._n_steps + min(self._n_steps // NEWS + 1, MAX_NEWS)
        points = []
        for key, steps in self._bins.items():
            middle = sorted(steps)[(len(steps) - 1) // 2]
            age = self._n_steps - self._latest[key]
            weight = len(steps) / (1 + age / FADE) / (middle[3] * middle[3])
            points.append((*middle[1:], weight))
        error = inf
        for knee in KNEES:
            n_below = sum([n_rows <= knee for n_rows, *_ in points])
            # A knee needs steps on both sides, and more of them than it has freedom.
            if knee and (n_below in (0, len(points)) or len(points) < MIN_POINTS):
                continue
            cost, remainder = _least_squares(points, knee)
            if not knee or remainder < error * MIN_GAIN:
                self.cost, error = cost, remainder

    def decode_seconds(self, n_most: int) -> list[float]:
        """
        Seconds of steps with 0 to *n_most* rows, all of which have logits; empty: nobody can say.

        Steps of a size that was seen take what a quarter of them took at most, and between two such
        sizes it rises evenly. Beyond the largest one the formula says what a row costs, or half of
        those before it if that is less: so it is tried, and then it is known. Nobody can say of half
        as many rows more, or sizes between would be passed over.
        """
        cost, least = self.cost, self._n_steps - MAX_AGE
        latest = self._decodes.items()
        sizes = [(n, step_s) for n, (_, step_s, at) in latest if at > least]
        if not sizes or cost is None:
            return []
        sizes.sort()
        # Below the smallest: what was dear meanwhile makes a row no cheaper than nothing.
        below, below_s = sizes[0]
        formula_s, seconds = cost.seconds(below, below), list[float]()
        for n_rows in range(min(below, n_most + 1)):
            more_s = cost.seconds(n_rows, n_rows) - formula_s
            seconds.append(below_s + max(more_s, (n_rows - below) * below_s / below))
        for above, above_s in sizes[1:]:
            each_s = (above_s - below_s) / (above - below)
            seconds += [below_s + n * each_s for n in range(above - below)]
            below, below_s = above, above_s
        # Beyond the largest.
        formula_s = cost.seconds(below, below)
        for n_more in range(max(below // 2, 1) + 1):
            more_s = cost.seconds(below + n_more, below + n_more) - formula_s
            seconds.append(below_s + min(more_s, n_more * below_s / below / 2))
        return seconds[: n_most + 1]


def _least_squares(
    points: Items[tuple[int, int, float, float]], knee: int
) -> tuple[StepCost, float]:
    """The fit with that knee, and its error; what would cost less than nothing is left out."""
    # Sums of products of the features 1, narrow rows, outputs, wide rows, and of the seconds.
    sums = [[0.0] * 5 for _ in range(5)]
    for n_rows, n_outputs, seconds, weight in points:
        n_narrow = min(n_rows, knee or n_rows)
        features = (1.0, n_narrow, n_outputs, n_rows - n_narrow, seconds)
        for line, feature in zip(sums, features, strict=True):
            line[:] = [
                total + weight * feature * other
                for total, other in zip(line, features, strict=True)
            ]
    # Each cost is pulled to zero by what it could explain, so units do not matter.
    matrix = [line.copy() for line in sums]
    for i, ridge in enumerate((RIDGE, RIDGE**2, RIDGE, RIDGE)):
        matrix[i][i] += ridge * sums[i][i] or 1.0
    # As if one step had said that logits cost nothing, give or take the dearest row.
    row_s = max(seconds / n_rows for n_rows, _, seconds, _ in points)
    matrix[2][2] += (DOUBT / row_s) ** 2
    used = [0, 1, 2, 3]
    while True:
        # Every line loses its part of all other unknowns.
        lines = {i: [*matrix[i]] for i in used}
        for i, pivot in lines.items():
            for j in used:
                factor = lines[j][i] / pivot[i] if j != i else 0.0
                lines[j] = [
                    x - factor * y for x, y in zip(lines[j], pivot, strict=True)
                ]
        values = {i: lines[i][4] / lines[i][i] if i in lines else 0.0 for i in range(4)}
        _, lowest = min((values[i] * sums[i][i] ** 0.5, i) for i in used)
        if values[lowest] >= 0:
            break
        used.remove(lowest)
    # The squares of what is left, by the sums alone.
    error = sums[4][4]
    for i in used:
        explained = sum([values[j] * sums[i][j] for j in used])
        error -= values[i] * (2 * sums[i][4] - explained)
    wide_s = values[3] if knee else values[1]
    return StepCost(values[0], values[1], values[2], knee, wide_s), max(error, 0.0)


class StepBudget:
    """
    Token budget of the next step: a fixed number, or one that follows what steps take here.

    1. A step stalls each stream, so it takes `target_s` at most, but for GRAIN tokens, without
       which prompts would not go on and products be poor. With a target of None it takes GOAL_S
       or, where weights take that long to read, LEAST_FACTOR times as long as they.
    2. A step that no stream waits for may take IDLE_FACTOR times the target, or times what weights
       take: only who comes meanwhile waits.
    3. Prompts of a burst are computed in one step if that takes BURST_FACTOR times as long at
       most. Their streams then begin together, so none is stalled by the prompt of another one,
       and each later step has a token of all. This is no burst if one prompt takes most of the
       step, because shorter ones would wait for it.
    """

    def __init__(
        self,
        fixed: int | None,
        target_s: float | None,
        max_tokens: int,
        costs: CostHistory,
    ) -> None:
        self._fixed = fixed
        self._goal_s = GOAL_S if target_s is None else target_s
        self._holds = target_s is not None  # whatever the weights take
        self._max_tokens = max_tokens
        self._costs = costs

    def limit(
        self,
        n_decodes: int,
        n_streams: int,
        n_behind: Items[int],
        *,
        n_turns: int = 1,
        spent_s: float = 0.0,
    ) -> int:
        """
        Tokens the next step may hold, 1 to max_tokens.

        Args:
            n_decodes: streams that are to go on in it.
            n_streams: streams that wait for it.
            n_behind: tokens that each prompt has left.
            n_turns: the steps from one token of a stream to the next, which share the
                target.
            spent_s: what captures take of the step.
        """
        if self._fixed is not None:
            return min(self._fixed, self._max_tokens)
        cost = self._costs.cost
        if cost is None:
            return min(FIRST_BUDGET, self._max_tokens)
        fixed_s = 0.0 if self._holds else cost.fixed_s
        if n_streams:
            # A step has rows at all, however long the weights take.
            goal_s = max(self._goal_s, LEAST_FACTOR * fixed_s) / n_turns
            growth = GROWTH
        else:
            # What stalls nobody may take longer, and may be a larger guess.
            goal_s, growth = IDLE_FACTOR * max(self._goal_s, fixed_s), IDLE_GROWTH
        n_rows = cost.n_rows(goal_s - spent_s, n_decodes)
        # Steps grow step by step, because a formula of small ones is a guess of large ones.
        n_most = max(growth * self._costs.largest, FIRST_BUDGET)
        n_most = min(n_most, self._max_tokens)
        if not n_streams and n_rows < (n_all := sum(n_behind)) <= n_most:
            is_burst = max(n_behind) <= n_all / 2
            step_s = cost.seconds(n_all, len(n_behind)) + spent_s
            if is_burst and step_s <= BURST_FACTOR * self._goal_s:
                return n_all
        # A hundredth of a row is the rounding of the fit.
        n_tokens = int(min(n_rows, n_most) + 0.01) // GRAIN * GRAIN
        return max(n_tokens, min(GRAIN, self._max_tokens))


# -- copies ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyPrice:
    """Seconds of copies between a context and host memory; 0: not measured, or nothing."""

    base_s: float = 0.0  # of a capture whose cells are one run
    run_s: float = 0.0  # of each further run
    token_s: float = 0.0  # of each cell
    restore_s: float = 0.0  # of filling a slot, however little


class CopySpeed:
    """
    Bytes a second of one tier, at best.

    Args:
        base_s: of a restore, however small it is.
    """

    def __init__(self, prefill: CostHistory, base_s: float = 0.0) -> None:
        self._prefill = prefill
        self._base_s = base_s if base_s > FREE_S else 0.0
        self._bytes_per_s = 0.0

    def observe(self, n_bytes: int, seconds: float) -> None:
        """Learn from a restore of *n_bytes* that took *seconds*."""
        # It may have taken less than the base as measured. A tenth of it at least was copying.
        copied_s = max(seconds - self._base_s, seconds / 10)
        if copied_s > 0:
            self._bytes_per_s = max(self._bytes_per_s, n_bytes / copied_s)

    def seconds(self, n_bytes: int) -> float:
        """Seconds that a restore of *n_bytes* takes at best."""
        copied_s = n_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        return self._base_s + copied_s

    def n_worth(self, n_bytes: int) -> int:
        """The least tokens that take as long to compute as *n_bytes* to restore."""
        return ceil(self.seconds(n_bytes) * (self._prefill.tokens_per_s or 0.0))


class Capture(NamedTuple):
    """A capture of a slot that pays."""

    stop: int  # of the tokens that are captured
    n_runs: int  # of cells, as a rule
    bound_s: float  # what it takes at most, of the time that a step has for captures


class Captures:
    """
    Decides which captures a step makes, by their price.

    Rules:
    1. What is dearer to capture than to compute again is not captured.
    2. Others who wait for a step wait for its captures, too. So these take no more than half of
       `target_s`, and no more than decodes leave of it; prompts get less of the step. What does
       not fit is captured in part, from its start on, or not at all.
    3. The price that rule 2 counts with is the highest one observed, which falls with each
       capture that is cheaper. A step captures in parts a few tokens at first, and then a few
       times what was observed, so a wrong price is noticed while it is small.
    4. A capture proves that none of its tokens took longer than all of it. After some captures
       that were not made for their price a few tokens are captured to see whether it is right,
       if they fit in a step by that price. So neither a busy moment nor a wrong
       first measure ends all captures.

    Outputs lie in cells one by one among those of other sequences, and prompts in runs. So an
    output is often not worth what its prompt is.

    Args:
        price: None: not measured, so all pays until a capture is observed.
        token_bytes: of a state, for each token of it.
    """

    def __init__(
        self,
        price: CopyPrice | None,
        prefill: CostHistory,
        target_s: float,
        token_bytes: int = 0,
    ) -> None:
        self.spent_s = 0.0  # of this step
        self._left_s = inf
        self._trial_s = 0.0
        self._n_left = inf  # tokens
        self._is_measured = price is not None
        price = price or CopyPrice()
        base_s, run_s, token_s = price.base_s, price.run_s, price.token_s
        # The base is that of a capture of several tokens, none of which took longer than all.
        if base_s:
            run_s, token_s = min(run_s, base_s), min(token_s, base_s)
        self._base_s, self._run_s, self._token_s = base_s, run_s, token_s
        self._prefill = prefill
        self._target_s = target_s
        # Of a token, in a run of its own: at least, and at most.
        self._least_s = token_s + run_s + COPY_DOUBT * base_s
        # Bytes alone have a price that small copies do not show.
        if self._is_measured:
            self._least_s += token_bytes / MIN_BYTES_PER_S
        self._worst_s = max(self._least_s, base_s / N_PROBED)
        self._n_observed = 0  # captures
        self._max_observed = 0  # tokens of one
        self._n_refused = 0  # captures since the last one
        self._decode_s = 0.0  # of a step without prompts

    def begin(self, *, others_wait: bool) -> None:
        """Begin a step; without others only rule 1 holds."""
        target_s, decode_s = self._target_s, self._decode_s
        self.spent_s, self._left_s, self._n_left = 0.0, inf, inf
        self._trial_s = ALONE * target_s
        if not others_wait:
            return
        self._trial_s = target_s - decode_s
        # Rule 2, with a little that is always allowed, or nothing would ever be captured.
        share_s = min(target_s * SHARE, target_s - decode_s)
        self._left_s = max(share_s, SLACK * max(target_s, decode_s))
        # Rule 3: a few tokens at first, then a few times as many as were observed.
        if self._is_measured:
            self._n_left = max(MIN_PART, COPY_GROWTH * self._max_observed)

    def reserve_slack(self) -> None:
        """Prompts have the rest of the step now: what else is captured is beyond the target."""
        if self._left_s != inf:
            self._left_s = min(self._left_s, SLACK * self._target_s)
            self._trial_s = min(self._trial_s, SLACK * self._target_s)

    def plan(
        self, start: int, stop: int, n_prompt: int, *, in_parts: bool
    ) -> Capture | None:
        """
        The capture of the tokens [start, stop) of a slot, or of their beginning.

        Args:
            n_prompt: tokens before that one were computed in chunks.
            in_parts: a beginning is of use, too.

        Returns:
            None if none pays, or there is no time for it. Call spend() with it else.
        """
        n_prompt = min(max(n_prompt, start), stop)
        if in_parts:
            capture = self._part(start, stop, n_prompt)
        else:
            capture = self._whole(start, stop, n_prompt)
        if capture is not None:
            return capture
        # Rule 4: after some refusals a few tokens are captured to see what they take.
        self._n_refused += 1
        if self._n_refused <= MAX_REFUSALS:
            return None
        return self._trial(start, stop, in_parts=in_parts)

    def _part(self, start: int, stop: int, n_prompt: int) -> Capture | None:
        """The prompt alone if its output does not pay, and what of it there is time for."""
        stops = (stop, n_prompt) if n_prompt > start else (stop,)
        end = max(stops, key=lambda end: self._gain_s(start, end, n_prompt))
        # The cells of a beginning may lie apart, so each token counts as a run.
        n_most = self._n_left
        if self._worst_s and self._left_s != inf:
            n_most = min(n_most, (self._left_s - self._base_s) / self._worst_s)
        if n_most < end - start:
            end = start + max(int(n_most), 0)
        if end < stop and end - start < MIN_PART:
            return None
        bound_s = self._bound_s(end - start)
        if bound_s > self._left_s or self._gain_s(start, end, n_prompt) <= 0:
            return None
        return Capture(end, _n_runs(start, end, n_prompt), bound_s)

    def _whole(self, start: int, stop: int, n_prompt: int) -> Capture | None:
        """All or nothing: no smaller capture can say what it takes, so the price is trusted."""
        bound_s = self._bound_s(stop - start)
        is_unpriced = self._is_measured and not bound_s and stop - start > self._n_left
        if bound_s > self._left_s or is_unpriced:
            # The highest price may be that of a busy moment, and no beginning can correct it. So
            # the lowest one counts in the end, which is doubted, too, before it is confirmed.
            self._worst_s = max(self._worst_s * RELIEF, self._least_s)
            if self._n_observed < MIN_OBSERVED_COPIES:
                self._least_s *= SLOW_RELIEF
            return None
        if self._gain_s(start, stop, n_prompt) <= 0:
            return None
        return Capture(stop, _n_runs(start, stop, n_prompt), bound_s)

    def _trial(self, start: int, stop: int, *, in_parts: bool) -> Capture | None:
        """A capture that need not pay, to learn what captures take."""
        left_s, n_tokens = self._trial_s - self.spent_s, stop - start
        # A beginning suffices, if it is of use. Else all of it is tried.
        if in_parts:
            n_tokens = min(n_tokens, MIN_PART)
            n_fit = (left_s - self._base_s) / max(self._worst_s, LEAST_TOKEN_S)
            n_tokens = min(n_tokens, max(int(n_fit), 1))
        bound_s = self._bound_s(n_tokens)
        if bound_s > left_s or n_tokens > self._n_left:
            return None
        return Capture(start + n_tokens, n_tokens, bound_s)

    def spend(self, capture: Capture, n_tokens: int) -> None:
        """The step makes *capture*, of *n_tokens*."""
        self._left_s -= capture.bound_s
        self._n_left -= n_tokens
        self.spent_s += capture.bound_s
        self._n_refused = 0

    def observe(self, n_tokens: int, n_runs: int, seconds: float) -> None:
        """Learn from a capture that took *seconds*."""
        if seconds <= 0 or n_tokens < 1:
            return
        # No part of a capture took longer than all of it.
        self._max_observed = max(self._max_observed, n_tokens)
        self._base_s = min(self._base_s, seconds)
        self._run_s = min(self._run_s, seconds)
        # What goes beyond the base is the price of tokens, at worst all of it.
        beyond_s, n_beyond = seconds - self._base_s, max(n_tokens - N_PROBED, 1)
        worst_s = beyond_s / n_beyond
        token_s = max(beyond_s - self._run_s * (n_runs - 1), 0.0) / n_beyond
        # The highest price rises at once, so that no step is too long twice, and falls slowly.
        self._worst_s = max(worst_s, min(self._worst_s * (1 - SMOOTHING), seconds))
        self._least_s = min(self._least_s, worst_s) if self._n_observed else worst_s
        self._n_observed += 1
        self._token_s = min(
            self._token_s + SMOOTHING * (token_s - self._token_s), seconds
        )

    def observe_decode(self, seconds: float) -> None:
        """Learn from a step without prompts and moves."""
        self._decode_s += SMOOTHING * (seconds - self._decode_s)

    def _bound_s(self, n_tokens: int) -> float:
        """What a capture takes at most."""
        return self._base_s + n_tokens * self._worst_s

    def _expected_s(self, start: int, stop: int, n_prompt: int) -> float:
        by_runs_s = self._run_s * (_n_runs(start, stop, n_prompt) - 1)
        return self._base_s + by_runs_s + self._token_s * (stop - start)

    def _gain_s(self, start: int, stop: int, n_prompt: int) -> float:
        """Seconds that a capture saves whoever computes its tokens again."""
        expected_s, speed = (
            self._expected_s(start, stop, n_prompt),
            self._prefill.tokens_per_s,
        )
        if speed is None or expected_s <= FREE_S:
            return stop - start  # the more the better
        return (stop - start) / speed - expected_s


def _n_runs(start: int, stop: int, n_prompt: int) -> int:
    """Runs of cells, as a rule: a chunk of a prompt is one, and each token of output."""
    n_in_chunks = min(stop, n_prompt) - start
    return max(ceil(n_in_chunks / CHUNK) + stop - max(n_prompt, start), 1)
