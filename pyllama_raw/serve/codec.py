"""What the writers of answers have in common, in whatever dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pyllama_raw import Delta, Result
from pyllama_raw.serve.events import event
from pyllama_raw.serve.failures import Failure


class Codec(ABC):
    """
    Writes one answer. Output *index* is that of `n`, *prompt* that of the list of prompts.

    Frames are complete events; an empty one is not sent.
    """

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002
        """Frames before the first delta; the prompt has *n_prompt* tokens."""
        return b""

    @abstractmethod
    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Frames of new text."""

    @abstractmethod
    def ended(self, prompt: int, result: Result) -> bytes:
        """Frames of the end of an output."""

    def failed(self, failure: Failure) -> bytes:
        """Frames of an error after the answer began."""
        return event(failure.body())

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:  # noqa: ARG002
        """Frames when all is written."""
        return b""

    @abstractmethod
    def whole(self, results: Sequence[Sequence[Result]]) -> Any:
        """The answer at once, for a JSON encoder; results by prompt, then by index."""


def timings(result: Result, n_output: int) -> dict[str, float]:
    """
    Times of an answer, as llama.cpp's server tells them in all its dialects.

    The first output token belongs to the prompt.
    """
    n_cached = result.usage.cached_tokens
    n_prompt, times = result.usage.prompt_tokens - n_cached, result.timings
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        **_speed("prompt", n_prompt, times.prefill_s),
        "predicted_n": n_output,
        **_speed("predicted", max(n_output - 1, 0), times.decode_s),
    }


def _speed(name: str, n: int, seconds: float | None) -> dict[str, float]:
    ms = 1e3 * (seconds or 0.0)
    return {
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": 1e3 * n / ms if ms else 0.0,
    }
