"""Totals of a run: tokens, rates over the wall time without loading, latencies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pyllama_raw.api.results import EngineStats, percentile
from pyllama_raw.cli.inputs import Outcome


def summarize(
    outcomes: Iterable[Outcome], *, load_s: float, wall_s: float, stats: EngineStats
) -> dict[str, Any]:
    """
    The object that `--summary` writes.

    Args:
        wall_s: from the first submission to the last end.
    """
    outcomes = list(outcomes)
    results = [result for outcome in outcomes for result in outcome.results]
    n_prompt = sum(result.usage.prompt_tokens for result in results)
    n_output = sum(result.usage.completion_tokens for result in results)
    n_succeeded = sum(outcome.succeeded for outcome in outcomes)
    first = (result.timings.ttft_s for result in results)
    return {
        "requests": len(outcomes),
        "succeeded": n_succeeded,
        "failed": len(outcomes) - n_succeeded,
        "load_s": load_s,
        "wall_s": wall_s,
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "cached_tokens": sum(result.usage.cached_tokens for result in results),
        "media_tokens": sum(result.usage.media_tokens for result in results),
        "total_tokens_per_s": (n_prompt + n_output) / wall_s,
        "completion_tokens_per_s": n_output / wall_s,
        "ttft_s": _spread(ttft_s for ttft_s in first if ttft_s is not None),
        "itl_s": _spread(gap for result in results for gap in result.timings.itl_s),
        "host_s_per_step": _host_s_per_step(wall_s, stats),
        "engine": asdict(stats),
    }


def _host_s_per_step(wall_s: float, stats: EngineStats) -> float | None:
    """Time outside libllama: planning, delivery, and whatever waited between steps."""
    if not stats.steps:
        return None
    inside_s = stats.decode_s + stats.sample_s + stats.capture_s + stats.restore_s
    return (wall_s - inside_s) / stats.steps


def _spread(values: Iterable[float]) -> dict[str, float | None]:
    numbers = list(values)
    ranks = {"p50": 50, "p99": 99, "max": 100}
    return {
        name: percentile(numbers, p) if numbers else None for name, p in ranks.items()
    }
