"""
Which slot holds the longest prefix of a sequence, now or when its leader got there.

Only slots of the same namespace count, and none whose tokens a context shift changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_raw.core.limits import N_FRESH, ContextLimits
from pyllama_raw.core.memory.radix_tree import n_common
from pyllama_raw.core.memory.slots import Slot, Slots
from pyllama_raw.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Source:
    """A slot that holds a prefix, or will when its sequence has computed it."""

    slot: Slot
    n_now: int
    n_later: int


def find_source(slots: Slots, sequence: Sequence) -> Source | None:
    """The slot that will have most of *sequence*; of equals the one that has it now."""
    n_most = max(sequence.n_in_chunks - N_FRESH, 0)
    key = sequence.tokens[:n_most].tobytes()
    best: Source | None = None
    for slot in slots.all:
        found = _shared(slot, sequence, key, slots.limits)
        if found is not None and (
            best is None or (found.n_later, found.n_now) > (best.n_later, best.n_now)
        ):
            best = found
    return best


def _shared(
    slot: Slot, sequence: Sequence, key: bytes, limits: ContextLimits
) -> Source | None:
    other = slot.sequence
    if other is sequence:
        return None
    if other is None:
        namespace, tokens, n_held = slot.namespace, slot.left, slot.n_left
        n_kept = n_held if slot.is_usable else 0
    else:
        namespace, tokens = other.request.namespace, other.tokens.tobytes()
        n_held, n_kept = other.n_computed, limits.n_kept(other)
    if namespace != sequence.request.namespace or (other and other.is_shifted):
        return None
    n_same = min(n_common(tokens, key), n_kept)
    if n_same == 0:
        return None  # most often
    n_now = min(n_same, n_held)
    if not limits.can_cut and (n_now < n_held or limits.n_movable(n_now) < n_now):
        n_now = 0  # such memory is of use as a whole only
    n_later = n_now
    if other is not None and other.n_behind > 1 and not _waits_for(other, sequence):
        n_later = max(n_now, _n_later(other, n_same, limits))
    return Source(slot, n_now, n_later) if n_later else None


def _n_later(leader: Sequence, n_same: int, limits: ContextLimits) -> int:
    """How many of the first *n_same* tokens *leader* can stop at, to be copied."""
    if limits.can_cut:
        return n_same
    n_tokens = leader.n_in_chunks
    if 0 < n_tokens - n_same < N_FRESH:
        n_same = n_tokens - N_FRESH
    n_later = limits.n_movable(n_same)
    return n_later if n_later >= leader.n_computed + N_FRESH else 0


def _waits_for(sequence: Sequence | None, other: Sequence) -> bool:
    """Whether *sequence* goes on only when *other* has."""
    while sequence is not None:
        if sequence is other:
            return True
        sequence = sequence.leader
    return False
