"""
Which slot holds the longest prefix of a sequence, now or when its leader got there.

Only slots of the same namespace count, and none whose tokens a context shift changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_raw.core.radix_tree import n_common
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.slots import ContextLimits, Slot, Slots


@dataclass(frozen=True, slots=True)
class Source:
    """A slot that holds a prefix, or will when its sequence has computed it."""

    slot: Slot
    n_now: int
    n_later: int


def find_source(slots: Slots, sequence: Sequence) -> Source | None:
    """The slot that will have most of *sequence*; of equals the one that has it now."""
    key = sequence.tokens[: -slots.limits.n_fresh].tobytes()
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
    else:
        namespace, tokens = other.request.namespace, other.tokens.tobytes()
        n_held = min(other.n_computed, limits.n_kept(other))
    if namespace != sequence.request.namespace or (other and other.is_shifted):
        return None
    n_same = n_common(tokens, key)
    n_now = min(n_same, n_held)
    if not limits.can_cut and n_now < n_held:
        n_now = 0  # such memory is of use as a whole only
    computing = other is not None and other.n_behind > 1 and n_same > n_held
    if computing and _waits_for(other, sequence):
        computing = False
    n_later = n_same if computing else n_now
    return Source(slot, n_now, n_later) if n_later else None


def _waits_for(sequence: Sequence | None, other: Sequence) -> bool:
    """Whether *sequence* goes on only when *other* has."""
    while sequence is not None:
        if sequence is other:
            return True
        sequence = sequence.leader
    return False
