"""
Sources: slots that hold a prefix of a sequence, now or when their sequences got there.

Only slots of the same namespace count, and none whose tokens a context shift changed.
"""

from __future__ import annotations

from bisect import bisect_left

from pyllama_raw.core.exact import N_FRESH
from pyllama_raw.core.memory.limits import ContextLimits
from pyllama_raw.core.memory.placement import Source
from pyllama_raw.core.memory.radix_tree import TOKEN_BYTES, n_common
from pyllama_raw.core.memory.slots import Idle, Slots
from pyllama_raw.core.namespace import Namespace
from pyllama_raw.core.sequence import Running, Sequence


def n_reusable(sequence: Sequence) -> int:
    """Tokens of *sequence* that may be taken over; those after are computed."""
    return sequence.whole(max(sequence.n_in_chunks - N_FRESH, 0))


def find_sources(slots: Slots, sequence: Sequence) -> list[Source]:
    """The slots that have something of *sequence*, or will."""
    key = sequence.tokens[: n_reusable(sequence)].tobytes()
    first, first_token = key[:TOKEN_BYTES], sequence.tokens[0]
    found = []
    for place in slots.all if key else ():
        if type(place) is Idle:
            may_share = place.left.startswith(first)
        else:
            may_share = place.tokens[0] == first_token
        if may_share:  # seldom
            source = _shared(place, sequence, key, slots.limits)
            if source is not None:
                found.append(source)
    return found


class Prefixes:
    """
    Prefixes that slots hold, or will, as of now, in memory that can be cut.

    Sorted: of all keys those beside the place of another one have most in common with it.
    """

    def __init__(self, slots: Slots) -> None:
        self._keys: dict[Namespace, list[bytes]] = {}
        for place in slots.all:
            if type(place) is Idle:
                self._keys.setdefault(place.namespace, []).append(place.left)
            elif isinstance(place, Running) and not place.sequence.is_shifted:
                n_tokens = slots.limits.n_kept(place.sequence)
                if place.n_behind == 1:
                    n_tokens = min(n_tokens, place.n_computed)
                key = place.tokens[:n_tokens].tobytes()
                self._keys.setdefault(place.request.namespace, []).append(key)
        for keys in self._keys.values():
            keys.sort()

    def n_longest(self, sequence: Sequence, n_most: int) -> int:
        """Count the first tokens of a waiting *sequence*, at most *n_most*, that a slot has, or will."""
        keys = self._keys.get(sequence.request.namespace, [])
        key = sequence.tokens[:n_most].tobytes()
        at = bisect_left(keys, key)
        beside = keys[max(at - 1, 0) : at + 1]
        return sequence.whole(max([n_common(each, key) for each in beside], default=0))


def _shared(
    place: Idle | Running, sequence: Sequence, key: bytes, limits: ContextLimits
) -> Source | None:
    if isinstance(place, Idle):
        namespace, tokens, n_held = place.namespace, place.left, place.n_left
        n_kept = n_held if place.is_usable else 0
    else:
        other = place.sequence
        if other is sequence or other.is_shifted:
            return None
        namespace, tokens = place.request.namespace, place.tokens.tobytes()
        n_held, n_kept = place.n_computed, limits.n_kept(other)
    if namespace != sequence.request.namespace:
        return None
    n_same = min(n_common(tokens, key), n_kept)
    if n_same == 0:
        return None  # most often
    n_now = sequence.whole(min(n_same, n_held))
    if not limits.can_cut and (n_now < n_held or limits.n_movable(n_now) < n_now):
        n_now = 0  # such memory is of use as a whole only
    if isinstance(place, Idle):
        return Source(place.slot, n_now, n_now, n_held) if n_now else None
    n_later = n_now
    if place.n_behind > 1 and not _waits_for(place, sequence):
        n_later = max(n_now, sequence.whole(_n_later(place, n_same, limits)))
    return Source(place.slot, n_now, n_later) if n_later else None


def _n_later(leader: Running, n_same: int, limits: ContextLimits) -> int:
    """Count the first *n_same* tokens that *leader* can stop at, to be copied."""
    if limits.can_cut:
        return leader.sequence.whole(n_same)
    n_tokens = leader.sequence.n_in_chunks
    if 0 < n_tokens - n_same < N_FRESH:
        n_same = n_tokens - N_FRESH
    n_later = limits.n_movable(leader.sequence.whole(n_same))
    is_whole = leader.sequence.whole(n_later) == n_later
    return n_later if is_whole and n_later >= leader.n_computed + N_FRESH else 0


def _waits_for(running: Running | None, sequence: Sequence) -> bool:
    """Whether *running* goes on only when *sequence* has."""
    while running is not None:
        if running.sequence is sequence:
            return True
        running = running.leader
    return False
