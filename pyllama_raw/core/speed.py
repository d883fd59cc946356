"""
Whether tokens are sooner restored than computed, by the speeds measured so far.

What was never measured is taken to pay, so that it is. A restore is judged by the fastest
one of its tier: a slow one says something about the moment, and a tier that is never used
could not be measured again.
"""

from __future__ import annotations

from math import ceil

SMOOTHING = 0.25  # weight of the newest step
MIN_OBSERVED = 16  # smaller steps are bound by memory, not by tokens


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


class CopySpeed:
    """Bytes a second of one tier, at best."""

    def __init__(self, prefill: PrefillSpeed) -> None:
        self._prefill = prefill
        self._bytes_per_s = 0.0

    def observe(self, n_bytes: int, seconds: float) -> None:
        """Learn from a restore of *n_bytes* that took *seconds*."""
        if seconds > 0:
            self._bytes_per_s = max(self._bytes_per_s, n_bytes / seconds)

    def n_worth(self, n_bytes: int) -> int:
        """The least tokens that take as long to compute as *n_bytes* to restore."""
        tokens_per_s = self._prefill.tokens_per_s
        if tokens_per_s is None or not self._bytes_per_s:
            return 0
        return ceil(n_bytes / self._bytes_per_s * tokens_per_s)
