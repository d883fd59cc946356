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


def divide(
    mode: BudgetMode, n_streams: int, n_prompts: int, total: int, reserve: int = 0
) -> tuple[int, int]:
    """
    Tokens of streams and tokens of prompts, *total* together.

    Args:
        reserve: the most tokens of streams beside prompts; 0: as the mode has it, which is
            one for throughput_first.
    """
    n_most = min(n_streams, total)
    if n_streams and n_prompts and total:
        if mode == "balanced":
            n_most = min(n_most, max(total - 1, 1))
        elif mode == "throughput_first":
            n_most = min(n_most, max(total - total * 3 // 4, 1))
            reserve = reserve or 1
        n_most = min(n_most, reserve or n_most)
    return n_most, total - n_most
