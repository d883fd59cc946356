"""Greedy outputs that are the same but for near ties, which last digits decide."""

from collections.abc import Sequence

from pyllama_raw.core.request import TokenLogprobs

NEAR = 1e-3  # of log-probabilities; sums in 32 bits move them by less than 1e-4


def parting(
    scores: Sequence[TokenLogprobs], tokens: Sequence[int]
) -> tuple[int, float] | None:
    """
    Where *tokens* leave the greedy output that has *scores*, and the margin of its token there.

    None: nowhere, or at a near tie, behind which another output is as right.
    """
    for place, (score, token) in enumerate(zip(scores, tokens, strict=False)):
        if score.token_id != token:
            (_, best), (_, second) = score.top[:2]
            return None if best - second < NEAR else (place, best - second)
    return None
