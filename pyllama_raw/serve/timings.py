"""Times of an answer, as llama.cpp's server tells them in all its dialects."""

from __future__ import annotations

from pyllama_raw import Result


def timings(result: Result, n_output: int) -> dict[str, float]:
    """Counts of tokens with their times; the first output token belongs to the prompt."""
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
