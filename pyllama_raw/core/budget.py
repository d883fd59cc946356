"""
How many tokens a step may hold: the latency knob.

A step with streams in it stalls each of them for as long as it takes, so its budget is
what the machine computes in `target_s`. The speed is learned from the steps themselves.
"""

from __future__ import annotations

from pyllama_raw.core.speed import PrefillSpeed

FIRST_BUDGET = 64  # before anything was measured
IDLE_FACTOR = 4  # a step that stalls no stream may take longer
GRAIN = 16  # matrix kernels like multiples


class StepBudget:
    """Token budget of the next step: a fixed number, or one learned from step times."""

    def __init__(
        self,
        fixed: int | None,
        target_s: float,
        max_tokens: int,
        speed: PrefillSpeed,
    ) -> None:
        self._fixed = fixed
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._speed = speed

    def limit(self, *, streams: bool) -> int:
        """Tokens the next step may hold, 1 to max_tokens; *streams*: some are decoding."""
        if self._fixed is not None:
            return min(self._fixed, self._max_tokens)
        target = self._target_s if streams else self._target_s * IDLE_FACTOR
        tokens_per_s = self._speed.tokens_per_s
        if tokens_per_s is None:
            wanted = FIRST_BUDGET
        else:
            wanted = int(tokens_per_s * target) // GRAIN * GRAIN
        return max(min(wanted, self._max_tokens), min(GRAIN, self._max_tokens))
