"""
Scores go along with tokens: log-probabilities of a prompt that another one has, too.

The row of a token tells how likely the next one is, so a token that is not computed tells
nothing. A sequence that is scored may take over tokens as far as it needs no rows of them:
those before its first score, and those whose successors the slot has scored.
"""

from __future__ import annotations

from pyllama_raw.core.memory.slots import Idle
from pyllama_raw.core.sequence import Running, Sequence


def n_scored_by(
    place: Idle | Running, sequence: Sequence, n_same: int
) -> tuple[int, int]:
    """
    How many of *n_same* common tokens *sequence* may have: by now, and in the end.

    Fewer if it needs rows of them, because *place* has no scores of what follows.
    """
    own, scoring = sequence.request.scoring, place.scoring
    n_own = min(sequence.n_unscored, n_same)
    if own is None or n_own == n_same:
        return n_same, n_same
    # Other scores are of no use: they begin too late, or list more or less.
    n_after = n_own + 1
    if scoring is None or scoring.n_top != own.n_top or scoring.first > n_after:
        return n_own, n_own
    # What follows the last common token differs, so its row is needed in any case.
    n_now = min(scoring.first - 1 + len(place.scores), n_same - 1)
    n_later = n_now if isinstance(place, Idle) else n_same - 1
    return max(n_own, n_now), max(n_own, n_later)


def take_scores(place: Idle | Running, sequence: Sequence, n_tokens: int) -> None:
    """Give *sequence*, which has the first *n_tokens* of *place*, the scores that it has of them."""
    scoring, n_own = place.scoring, sequence.n_unscored
    if n_own < n_tokens:
        assert scoring is not None, "see n_scored_by()"
        first = n_own + 1 - scoring.first
        sequence.prompt_logprobs += place.scores[first : n_tokens + 1 - scoring.first]
