"""
Placement: where a sequence takes its first tokens from, as a value.

In this order of preference: wait for a sequence that is computing them right now, if
that saves many; the memory of a slot, running or idle; a snapshot or file that reaches
further than its tier asks for; else they are computed.

`find_sources()` looks at all slots for what `place()` and `fill()` decide on. Only
slots of the same namespace count, and none whose tokens a context shift changed.
A sequence that is scored has less of them: see n_scored_by().
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from operator import attrgetter
from typing import NamedTuple

from pyllama_raw.core.memory.slots import ContextLimits, Idle, Slots
from pyllama_raw.core.memory.snapshots import TOKEN_BYTES, Hit, n_common
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import (
    N_FRESH,
    Running,
    Sequence,
    n_reusable,
    n_scored_by,
    n_shareable,
)

# -- what there is ---------------------------------------------------------------------


class Question(NamedTuple):
    """A question to placement: how much is looked for, and the rules of this memory."""

    n_most: int  # tokens that may be taken over; those after are computed
    can_cut: bool
    min_wait: int  # tokens that waiting must save
    min_gain: int  # tokens that giving up a slot in which one could go on must save


class Source(NamedTuple):
    """A slot that holds a prefix, or will when its sequence has computed it."""

    slot: int
    n_now: int
    n_later: int
    n_held: int | None = None  # tokens of an idle slot


class Offer(NamedTuple):
    """Snapshots that a tier has of a sequence; there are cells for them."""

    tier: CacheTier
    hit: Hit
    min_gain: int  # tokens it must have beyond what is nearer, to be worth a restore


# -- what is decided -------------------------------------------------------------------


class TakeOver(NamedTuple):
    """Go on in an idle slot, after its first *n_tokens*."""

    slot: int
    n_tokens: int


class CopyOf(NamedTuple):
    """Have the first *n_tokens* of another slot, too."""

    slot: int
    n_tokens: int


class Restore(NamedTuple):
    """Restore what a tier has."""

    tier: CacheTier
    hit: Hit
    n_live: int  # tokens of it that a slot has, too


class Follow(NamedTuple):
    """Wait until the sequence in *slot* has *n_tokens*, and copy them."""

    slot: int
    n_tokens: int


class Cold(NamedTuple):
    """Compute everything."""

    n_tokens: int = 0


Placement = TakeOver | CopyOf | Restore | Follow | Cold


# -- the rule --------------------------------------------------------------------------


def place(
    question: Question,
    sources: Items[Source],
    offers: Items[Offer],
    idle: Items[int],
    wish: int | None = None,
) -> tuple[int, Placement]:
    """
    The slot for a sequence that has none, and what it starts from.

    Args:
        offers: of nearer tiers first.
        idle: slots without a sequence, the one that is missed least first.
        wish: the slot that the caller chose, which is had if it is idle.
    """
    if wish is not None and wish in idle:
        # What the slot has itself needs no copy, unless there is more elsewhere.
        own = max((s.n_now for s in sources if s.slot == wish), default=0)
        start = fill(question, [s for s in sources if s.slot != wish], offers)
        n_else = start.hit.n_tokens if isinstance(start, Restore) else start.n_tokens
        return wish, TakeOver(wish, own) if 0 < own >= n_else else start
    near, start = _nearest(sources), fill(question, sources, offers)
    # No slot has anything of it now: the one that is missed least is emptied.
    if near is None:
        return idle[0], start
    n_far = start.hit.n_tokens if isinstance(start, Restore) else 0
    if near.n_held is None or isinstance(start, Follow):
        # A running sequence has it, or will: that one keeps its slot.
        goes_on = False
    elif n_far >= near.n_now + question.min_gain:
        # A tier has so much more that the idle slot is better left to others.
        goes_on = False
    elif near.n_now == near.n_held:
        # The next turn of a chat: all that the idle slot holds is a prefix.
        goes_on = True
    else:
        # What the idle slot has beyond the prefix would be lost, so it is copied out
        # of, if there is another slot. A prompt that is asked again goes on all the
        # same: what it cuts off is an earlier answer.
        is_last, is_again = len(idle) == 1, near.n_now == question.n_most
        goes_on = question.can_cut and (is_last or is_again)
    if goes_on:
        return near.slot, TakeOver(near.slot, near.n_now)
    # Not the slot that is copied, unless there is no other: what it holds is lost then.
    slot = next((index for index in idle if index != near.slot), idle[0])
    elsewhere = [source for source in sources if source.slot != slot]
    return slot, fill(question, elsewhere, offers)


def fill(question: Question, sources: Items[Source], offers: Items[Offer]) -> Placement:
    """The start of a sequence whose slot is empty."""
    near = _nearest(sources)
    n_live = n_best = near.n_now if near is not None else 0
    restore = None
    for tier, hit, min_gain in offers:
        # A lower tier must have more than all above it, by what its copies cost.
        if hit.n_tokens >= n_best + min_gain:
            restore, n_best = Restore(tier, hit, n_live), hit.n_tokens
    # Waiting must save many tokens beyond what is there now, because it takes steps.
    far = max(sources, key=attrgetter("n_later"), default=None)
    if far is not None and far.n_later >= n_best + question.min_wait:
        return Follow(far.slot, far.n_later)
    if restore is not None:
        return restore
    return CopyOf(near.slot, n_live) if near is not None else Cold()


def _nearest(sources: Items[Source]) -> Source | None:
    """The source that has most now; one that need not be copied, if there is one."""
    now = [source for source in sources if source.n_now]
    return max(now, key=lambda s: (s.n_now, s.n_now == s.n_held), default=None)


# -- the look at all slots -------------------------------------------------------------


def find_sources(slots: Slots, sequence: Sequence) -> list[Source]:
    """The slots that have something of *sequence*, or will."""
    n_most = n_reusable(sequence)
    if sequence.request.scoring is not None:
        n_most = n_shareable(sequence)
    key = sequence.tokens[:n_most].tobytes()
    first, first_token = key[:TOKEN_BYTES], sequence.tokens[0]
    sources = []
    for place in slots.all if key else ():
        # Most slots differ in the first token, which is sooner compared than all.
        if isinstance(place, Idle):
            may_share = place.key.startswith(first)
        else:
            may_share = place.tokens[0] == first_token
        if may_share:
            source = _source(place, sequence, key, slots.limits)
            if source is not None:
                sources.append(source)
    return sources


def _source(
    place: Idle | Running, sequence: Sequence, key: bytes, limits: ContextLimits
) -> Source | None:
    """The slot at *place* as a source of *key*, the first tokens of *sequence*."""
    if isinstance(place, Idle):
        namespace, tokens, n_held = place.namespace, place.key, place.n_held
        n_shareable = n_held if place.is_usable else 0
    else:
        other = place.sequence
        if other is sequence or other.is_shifted:
            return None
        namespace, tokens = place.request.namespace, place.tokens.tobytes()
        n_held, n_shareable = place.n_computed, limits.n_kept(other)
    if namespace != sequence.request.namespace:
        return None
    n_same = min(n_common(tokens, key), n_shareable)
    if n_same == 0:
        return None
    n_least = n_most = n_same
    if sequence.request.scoring is not None:
        n_least, n_most = n_scored_by(place, sequence, n_same)
    n_now = sequence.whole(min(n_least, n_held))
    # Memory that cannot be cut is of use as a whole only.
    if not limits.kind.can_cut and (n_now < n_held or limits.n_movable(n_now) < n_now):
        n_now = 0
    if isinstance(place, Idle):
        return Source(place.slot, n_now, n_now, n_held) if n_now else None
    # A running prompt will have more, unless it waits for *sequence* itself.
    n_later, leads = n_now, place.n_behind > 1
    ahead: Running | None = place
    while leads and ahead is not None:
        leads, ahead = ahead.sequence is not sequence, ahead.leader
    if leads:
        n_later = max(n_now, sequence.whole(_n_later(place, n_most, limits)))
    return Source(place.slot, n_now, n_later) if n_later else None


def _n_later(leader: Running, n_same: int, limits: ContextLimits) -> int:
    """Count the first *n_same* tokens that *leader* can stop at, to be copied."""
    if limits.kind.can_cut:
        return leader.sequence.whole(n_same)
    # A chunk has to end there, so that enough tokens are left behind it, and before it.
    n_tokens = leader.sequence.n_in_chunks
    if 0 < n_tokens - n_same < N_FRESH:
        n_same = n_tokens - N_FRESH
    n_later = limits.n_movable(leader.sequence.whole(n_same))
    is_whole = leader.sequence.whole(n_later) == n_later
    return n_later if is_whole and n_later >= leader.n_computed + N_FRESH else 0
