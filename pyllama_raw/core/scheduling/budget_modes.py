"""
Budget modes: how the tokens of a step are divided between streams and prompts.

| mode | streams | prompts |
|---|---|---|
| balanced | all | what is left, and always some |
| latency_first | all | what is left, if there is any |
| throughput_first | at most a quarter | the rest |

Where streams have to wait they take turns.
"""

from __future__ import annotations

from typing import Literal

BudgetMode = Literal["balanced", "latency_first", "throughput_first"]


def divide(mode: BudgetMode, n_streams: int, total: int) -> tuple[int, int]:
    """Tokens of streams and tokens of the prompts beside them, *total* together."""
    n_most = total
    if mode == "balanced":
        n_most = max(total - 1, 1)
    elif mode == "throughput_first":
        n_most = max(total - total * 3 // 4, 1)
    n_streams = min(n_streams, n_most)
    return n_streams, total - n_streams
