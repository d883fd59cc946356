"""
The token budget of a step: the latency knob.

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

    def limit(self, *, streams: bool, n_turns: int = 1, spent_s: float = 0.0) -> int:
        """
        Tokens the next step may hold, 1 to max_tokens.

        Args:
            streams: some are decoding.
            n_turns: the steps from one token of a stream to the next; they share the target.
            spent_s: what captures take of the step.
        """
        if self._fixed is not None:
            return min(self._fixed, self._max_tokens)
        factor = 1 / n_turns if streams else IDLE_FACTOR
        target = max(self._target_s * factor - spent_s, 0.0)
        tokens_per_s = self._speed.tokens_per_s
        if tokens_per_s is None:
            wanted = FIRST_BUDGET
        else:
            wanted = int(tokens_per_s * target) // GRAIN * GRAIN
        return max(min(wanted, self._max_tokens), min(GRAIN, self._max_tokens))
