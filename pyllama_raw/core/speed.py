"""
Whether tokens are sooner copied than computed, by the prices and speeds measured so far.

A state is read from a device by copies that each take microseconds, however small. There is at
least one for each layer and each *run* of cells that lie side by side; without flash attention
values lie transposed, and there are hundreds. So `CopyPrice` is measured by small copies when the
context is made, before a large one is paid for.

What was never measured is taken to pay, so that it is. A restore is judged by the fastest
one of its tier: a slow one says something about the moment, and a tier that is never used
could not be measured again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

SMOOTHING = 0.25  # weight of the newest step
MIN_OBSERVED = 16  # smaller steps are bound by memory, not by tokens
FREE_S = 0.001  # a copy that takes less is not weighed: any step takes as long
SHARE = 0.5  # of `target_step_s`, the most that captures take of a step that others wait for
SLACK = 0.1  # of `target_step_s`, by which a step may be longer
CHUNK = 64  # tokens of a prompt in one run of cells, as a rule
MIN_PART = 16  # tokens; a smaller beginning is not worth a search
MIN_BYTES_PER_S = 2**30  # of a copy to fresh memory


class PrefillSpeed:
    """Tokens a second of steps that compute prompts."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def observe(self, n_tokens: int, seconds: float) -> None:
        """Learn from a step of *n_tokens* that took *seconds*."""
        if n_tokens < MIN_OBSERVED or seconds <= 0:
            return
        speed, known = n_tokens / seconds, self.tokens_per_s
        self.tokens_per_s = (
            speed if known is None else known + SMOOTHING * (speed - known)
        )


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

    def __init__(self, prefill: PrefillSpeed, base_s: float = 0.0) -> None:
        self._prefill = prefill
        self._base_s = base_s if base_s > FREE_S else 0.0
        self._bytes_per_s = 0.0

    def observe(self, n_bytes: int, seconds: float) -> None:
        """Learn from a restore of *n_bytes* that took *seconds*."""
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
    3. Prices are learned from what captures took, between nothing and what was measured first.

    Outputs lie in cells one by one among those of other sequences, and prompts in runs. So an
    output is often not worth what its prompt is.

    Args:
        token_bytes: of a state, for each token of it.
    """

    def __init__(
        self,
        price: CopyPrice,
        prefill: PrefillSpeed,
        target_s: float,
        token_bytes: int = 0,
    ) -> None:
        self.spent_s = 0.0  # of this step
        self._left_s = inf
        self._price = price
        self._prefill = prefill
        self._target_s = target_s
        self._max_token_s = price.token_s + price.run_s
        if price != FREE:  # bytes alone have a price that small copies do not show
            self._max_token_s += token_bytes / MIN_BYTES_PER_S
        self._token_s = price.token_s  # as a rule, beside what runs cost
        self._worst_s = self._max_token_s  # of a token in a run of its own
        self._decode_s = 0.0  # of a step without prompts

    def begin(self, *, others_wait: bool) -> None:
        """Begin a step; without others only rule 1 holds."""
        self.spent_s = 0.0
        target_s, decode_s = self._target_s, self._decode_s
        share_s = min(target_s * SHARE, target_s - decode_s)
        least_s = SLACK * max(target_s, decode_s)
        self._left_s = max(share_s, least_s) if others_wait else inf

    def reserve_slack(self) -> None:
        """Prompts have the rest of the step now: what else is captured is beyond the target."""
        if self._left_s != inf:
            self._left_s = min(self._left_s, SLACK * self._target_s)

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
        price, n_prompt = self._price, min(max(n_prompt, start), stop)
        stops = (stop, n_prompt) if in_parts and n_prompt > start else (stop,)
        end = max(stops, key=lambda end: self._gain_s(start, end, n_prompt))
        if not in_parts:
            bound_s = self._expected_s(start, end, n_prompt)
        else:
            # The cells of a beginning may lie apart, so each token counts as a run.
            if self._worst_s and self._left_s != inf:
                n_most = int((self._left_s - price.base_s) / self._worst_s)
                end = min(end, start + max(n_most, 0))
            bound_s = price.base_s + (end - start) * self._worst_s
            if end < stop and end - start < MIN_PART:
                return None
        if bound_s > self._left_s or self._gain_s(start, end, n_prompt) <= 0:
            return None
        return Capture(end, _n_runs(start, end, n_prompt), bound_s)

    def spend(self, capture: Capture) -> None:
        """The step makes *capture*."""
        self._left_s -= capture.bound_s
        self.spent_s += capture.bound_s

    def observe(self, n_tokens: int, n_runs: int, seconds: float) -> None:
        """Learn from a capture that took *seconds*."""
        price, most = self._price, self._max_token_s
        if seconds <= 0 or n_tokens < 1 or not most:
            return
        beyond_s = max(seconds - price.base_s, 0.0)
        by_runs_s = price.run_s * (n_runs - 1)
        worst_s = min(beyond_s / n_tokens, most)
        token_s = min(max(beyond_s - by_runs_s, 0.0) / n_tokens, most)
        self._worst_s += SMOOTHING * (worst_s - self._worst_s)
        self._token_s += SMOOTHING * (token_s - self._token_s)
        self._worst_s = max(self._worst_s, worst_s)  # not too long a step twice

    def observe_decode(self, seconds: float) -> None:
        """Learn from a step without prompts and moves."""
        self._decode_s += SMOOTHING * (seconds - self._decode_s)

    def _expected_s(self, start: int, stop: int, n_prompt: int) -> float:
        price, n_runs = self._price, _n_runs(start, stop, n_prompt)
        by_runs_s = price.run_s * (n_runs - 1)
        return price.base_s + by_runs_s + self._token_s * (stop - start)

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


FREE = CopyPrice()
