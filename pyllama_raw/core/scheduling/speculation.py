"""
Speculation: drafts of what streams will say next, and how many of them are worth a step.

1. A draft is what followed the latest tokens of a sequence where they stood before: see
   `Lookup`. A constraint that lets one text follow has drafts, too, and they come first.
2. A step with drafts computes their rows beside those of streams. The request's own sampler
   accepts drafts for as long as it samples just them, so no output depends on them.
3. What is expected is compared with each token that comes, drafted or not. So it costs nothing
   to learn how often drafts of a request are right, by the length of the match.
4. A step has as many drafts as promise most tokens a second: each row by the chance that it is
   reached, and the step by the time that steps with so many rows took. Without a gain of MIN_GAIN
   it has none.
5. The step after a steady plan is begun already. It has no drafts, and its plan is not steady.
6. There are none beside prompts, where memory is short and after failures.

Source: Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding,
2023, with a draft that is certain.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

from pyllama_raw.core.costs import CostHistory
from pyllama_raw.core.lookup import FIRST_CHANCES, Lookup
from pyllama_raw.core.memory.memory import Memory
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.step import Decode, StepPlan, Verify, Work

MAX_DEPTH = 16  # drafts of a sequence in a step
MIN_GAIN = 1.05  # times the tokens a second without drafts
MIN_CHANCE = 0.1  # of a draft to be reached and accepted; a less likely one is left out

FINE = 8  # up to so many rows each number is known by itself, then every fourth
OLD = 1024  # observations after which an older one is not trusted
FIRST_WEIGHT, LAST_WEIGHT = 0.5, 0.1  # of the newest one
MAX_JUMP = 3.0  # times the mean: more is the machine's moment


class StepSeconds:
    """Seconds of steps without prompts, by their rows."""

    def __init__(self, costs: CostHistory) -> None:
        self._costs = costs
        self._means: dict[int, tuple[float, float, int]] = {}  # seconds, weight, number
        self._n_observed = 0

    def observe(self, n_rows: int, seconds: float) -> None:
        """Learn from a step of *n_rows* that took *seconds*."""
        self._n_observed += 1
        size = _size(n_rows)
        mean = self._fresh(size)
        weight = FIRST_WEIGHT
        if mean is not None:
            weight = max(self._means[size][1] * 0.8, LAST_WEIGHT)
            seconds = mean + weight * (min(seconds, MAX_JUMP * mean) - mean)
        self._means[size] = seconds, weight, self._n_observed

    def expected(self, n_rows: int) -> float | None:
        """Seconds of a step of *n_rows*; None: nobody can say."""
        size = _size(n_rows)
        if (mean := self._fresh(size)) is not None:
            return mean
        sizes = [other for other in self._means if self._fresh(other) is not None]
        below = max((other for other in sizes if other < size), default=None)
        if below is None:
            return None
        seconds, n_more = self._means[below][0], size - below
        # Between two sizes that are known it rises evenly.
        above = min((other for other in sizes if other > size), default=None)
        if above is not None:
            row_s = (self._means[above][0] - seconds) / (above - below)
        # Else a further row takes as long as one of a prompt, or half as long as those below. That
        # is little, so it is tried, and then it is known.
        elif self._costs.tokens_per_s is not None:
            row_s = 1 / self._costs.tokens_per_s
        else:
            row_s = seconds / below / 2
        return seconds + row_s * n_more

    def _fresh(self, size: int) -> float | None:
        seconds, _, number = self._means.get(size, (0.0, 0.0, -OLD))
        return seconds if self._n_observed - number < OLD else None


def _size(n_rows: int) -> int:
    return n_rows if n_rows <= FINE else -(-n_rows // 4) * 4


class Speculation:
    """Puts drafts into plans; one of an engine."""

    def __init__(self, memory: Memory, costs: CostHistory) -> None:
        self._memory = memory
        self._slots = memory.slots
        self._seconds = StepSeconds(costs)
        self._chances = list(FIRST_CHANCES)  # of new requests
        self._is_begun = False  # the next step, by a steady plan

    def extend(
        self, works: list[Work], streams: Items[Running], *, steady: bool, alone: bool
    ) -> tuple[list[Work], bool]:
        """
        *works* with drafts, and whether the plan is steady.

        Args:
            streams: one for each of the first works, which are decodes.
            alone: nothing else is to be computed, and memory is not short.
        """
        # What a constraint forces it forces again, and that is worth more than a step ahead.
        steady = steady and not any(running.sequence.forces for running in streams)
        is_begun, self._is_begun = self._is_begun, steady
        if not alone or not self._slots.limits.kind.can_cut:
            return works, steady
        offers = [offer for r in streams if (offer := self._offer(r)) is not None]
        if not offers:
            return works, steady
        depths = self._depths(len(works), offers)
        if not depths:
            return works, steady
        # The plan before was steady: this step is begun, and the next one may have drafts.
        self._is_begun = False
        if is_begun:
            return works, False
        # Rejected drafts leave their cells at once, so no more are promised to anybody.
        n_rows = len(works) + sum(depths.values())
        self._memory.reclaim(n_rows)
        if self._slots.n_free_cells < n_rows:
            return works, False
        drafts = {running.slot: draft for running, draft, _ in offers}
        plain = [work for work in works if work.slot not in depths]
        return plain + [
            Verify(
                work.request_id,
                work.slot,
                work.pos,
                work.tokens + drafts[work.slot][: depths[work.slot]],
            )
            for work in works
            if work.slot in depths
        ], False

    def observe(self, plan: StepPlan, seconds: float) -> bool:
        """Learn from *plan*, which took *seconds*; whether it had drafts."""
        if not plan.works or type(plan.works[-1]) not in (Decode, Verify):
            return False
        if not plan.moves:
            self._seconds.observe(plan.n_tokens, seconds)
        return type(plan.works[-1]) is Verify

    def _offer(
        self, running: Running
    ) -> tuple[Running, array[int], list[float]] | None:
        """Drafts of *running*, and the chance of each to be reached and accepted."""
        sequence, request, tokens = running.sequence, running.request, running.tokens
        if not request.speculates or running.points:
            return None
        # It has its last token, or a full slot, with the token that comes anyway.
        n_left = request.max_tokens - sequence.n_output
        n_most = (
            min(n_left, self._slots.limits.n_ctx_slot - len(tokens), MAX_DEPTH + 1) - 1
        )
        if n_most < 1:
            return None
        lookup = sequence.lookup
        if lookup is None:
            lookup = sequence.lookup = Lookup(self._chances.copy())
        if not lookup.follow(tokens, self._chances):
            return None
        if sequence.forced:
            # What is forced comes first, and is as good as certain.
            draft = array("i", sequence.forced[:n_most])
            chances = [1.0] * len(draft)
        elif lookup.source:
            chances, chance = [], lookup.chance(0)
            while len(chances) < n_most and chance >= MIN_CHANCE:
                chances.append(chance)
                chance *= lookup.chance(len(chances))
            draft = lookup.draft(tokens, len(chances))
        else:
            return None
        # An end may be sampled, but nothing follows it. Nor are rows of images sampled.
        ends = (
            n
            for n, token in enumerate(draft)
            if token < 0 or token in request.stop_token_ids
        )
        del chances[next(ends, len(draft)) :]
        return (running, draft, chances) if chances else None

    def _depths(
        self, n_rows: int, offers: Items[tuple[Running, array[int], list[float]]]
    ) -> dict[int, int]:
        """Drafts by slot, so that most tokens come in a second; empty: there is no gain."""
        limits = self._slots.limits
        seconds = self._seconds.expected(n_rows)
        n_most = min(limits.n_outputs or limits.n_slots, limits.n_batch)
        n_most = min(n_most, limits.n_ubatch or n_most)
        if seconds is None:
            return {}
        # The likeliest first. The chances of a sequence fall, so its drafts stay in order.
        ranked = sorted(
            ((chance, r.slot) for r, _, chances in offers for chance in chances),
            key=lambda item: -item[0],
        )
        n_tokens, n_best, rate = float(n_rows), 0, MIN_GAIN * n_rows / seconds
        for n_drafts, (chance, _) in enumerate(ranked[: n_most - n_rows], 1):
            n_tokens += chance
            step_s = self._seconds.expected(n_rows + n_drafts)
            if step_s is not None and n_tokens > rate * step_s:
                n_best, rate = n_drafts, n_tokens / step_s
        depths: dict[int, int] = {}
        for _, slot in ranked[:n_best]:
            depths[slot] = depths.get(slot, 0) + 1
        return depths
