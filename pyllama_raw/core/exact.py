"""
Rules that a plan keeps so that equal requests have equal last digits.

libllama computes a single token by another kernel than several, which gives it other last
digits. So of every engine:
- A prompt is never computed in single tokens: not at its end (N_FRESH), not in chunks
  (chunk_size), not in what micro-batches leave (without_rest), not before a span (`whole` of
  core.spans) unless there is one only.

Of one that is `deterministic`, whose outputs must not depend on what ran before or beside
(`ContextLimits` has those that are not here):
- A lot is streams or one prompt (`divided` of core.scheduling.lots): split memory cuts the first
  row off a prompt that shares a batch with streams.
- Others may take over prompts, not outputs, which were computed token by token (n_kept).
- Output that is computed again is computed token by token again (n_chunked).
- What is moved in a window is moved by a multiple of ALIGN (n_movable).
- A sequence that was shifted keeps its slot, whoever is more urgent (is_repeatable).
"""

from __future__ import annotations

from pyllama_raw.core.sequence import Sequence

N_FRESH = 2  # tokens of a prompt that are always computed; one has to be sampled from
ALIGN = 64  # cells that no sum over cells divides: CPUs add 4 to 64 side by side

# -- always ------------------------------------------------------------------------


def chunk_size(share: int, n_ready: int, budget: int) -> int:
    """
    *share* tokens of *n_ready*, or one more or less where one would be left alone.

    libllama computes a single token by another kernel than several, which is slower for
    a prompt and gives it other last digits. With a budget of one there is no choice.
    """
    n_tokens = min(max(share, 2), n_ready, budget)
    # One would be left: it joins, or another one stays with it.
    if n_ready - n_tokens == 1:
        n_tokens = n_ready if n_ready <= budget else max(n_tokens - 1, min(2, budget))
    return n_tokens


def without_rest(
    shares: dict[int, int], n_decodes: int, n_ubatch: int
) -> dict[int, int]:
    """
    *shares* of a step that micro-batches divide, none of which is a single token.

    The largest share gives two tokens to a later step, which are none alone either.
    """
    n_tokens = n_decodes + sum(shares.values())
    if not 2 < n_ubatch < n_tokens or n_tokens % n_ubatch != 1:
        return shares
    slot = max(shares, key=shares.__getitem__)
    return shares | {slot: shares[slot] - 2} if shares[slot] > 3 else shares


def n_reusable(sequence: Sequence) -> int:
    """
    Tokens of *sequence* that may be taken over; those after are computed.

    Of slots that have scores it may have more: see n_scored_by().
    """
    if sequence.is_scoring:
        return min(n_shareable(sequence), sequence.n_unscored)
    return sequence.whole(max(sequence.n_in_chunks - N_FRESH, 0))


def n_shareable(sequence: Sequence) -> int:
    """Likewise, whether it needs scores of them or not; such a prompt has no spans."""
    return max(sequence.n_in_chunks - N_FRESH, 0)


# -- if deterministic --------------------------------------------------------------


def n_kept(sequence: Sequence) -> int:
    """
    Tokens of *sequence* that others may take over, once they are computed.

    A prompt of one token was computed like output.
    """
    n_prompt = sequence.request.n_prompt
    return n_prompt if n_prompt >= N_FRESH else 0


def n_movable(n_tokens: int, n_swa: int) -> int:
    """
    The most of a slot's first *n_tokens* that others may get a copy of.

    libllama saves what is in the window and restores it to the first cells. Moved by less
    than ALIGN, sums over cells are made in another order.
    """
    n_moved = max(n_tokens - n_swa, 0) if n_swa else 0
    return n_tokens - n_moved % ALIGN
