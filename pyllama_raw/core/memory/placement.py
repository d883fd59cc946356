"""
Placement: where a sequence takes its first tokens from, decided once, as a value, then done.

In this order of preference: wait for a sequence that is computing them right now, if that
saves many; the memory of a slot, running or idle; a snapshot or file that reaches further
than its tier asks for; else they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from pyllama_raw.core.memory.cache_entry import Hit
from pyllama_raw.core.request import CacheTier


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


class Question(NamedTuple):
    """A question to placement: what is looked for, and the rules of this memory."""

    n_most: int  # tokens that may be taken over; those after are computed
    can_cut: bool
    min_wait: int  # tokens that waiting must save
    min_gain: int  # tokens that giving up a slot in which one could go on must save


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


Placement = TakeOver | CopyOf | Restore | Follow | Cold


def place(
    wanted: Question, sources: Items[Source], offers: Items[Offer], idle: Items[int]
) -> tuple[int, Placement]:
    """
    The slot for a sequence that has none, and what it starts from.

    Args:
        offers: of nearer tiers first.
        idle: slots without a sequence, the one that is missed least first.
    """
    near, found = _nearest(sources), fill(wanted, sources, offers)
    if near is None:
        return idle[0], found
    if _goes_on(wanted, near, found, is_last=len(idle) == 1):
        return near.slot, TakeOver(near.slot, near.n_now)
    slot = next((index for index in idle if index != near.slot), idle[0])
    left = [source for source in sources if source.slot != slot]
    return slot, fill(wanted, left, offers)


def fill(wanted: Question, sources: Items[Source], offers: Items[Offer]) -> Placement:
    """The start of a sequence whose slot is empty."""
    near = _nearest(sources)
    n_live = near.n_now if near is not None else 0
    load = _load(offers, n_live)
    n_best = load.hit.n_tokens if load is not None else n_live
    far = max(sources, key=lambda source: source.n_later, default=None)
    if far is not None and far.n_later >= n_best + wanted.min_wait:
        return Follow(far.slot, far.n_later)
    if load is not None:
        return load
    return CopyOf(near.slot, n_live) if near is not None else Cold()


def _goes_on(
    wanted: Question, near: Source, found: Placement, *, is_last: bool
) -> bool:
    """
    Whether to go on in the slot of *near* instead of copying out of it.

    A prompt that is asked again does: what it cuts off is an earlier answer.
    """
    if near.n_held is None or isinstance(found, Follow):
        return False
    if (
        isinstance(found, Restore)
        and found.hit.n_tokens >= near.n_now + wanted.min_gain
    ):
        return False
    if near.n_now == near.n_held:
        return True
    return wanted.can_cut and (is_last or near.n_now == wanted.n_most)


def _nearest(sources: Items[Source]) -> Source | None:
    """The source that has most now; one that need not be copied, if there is one."""
    now = [source for source in sources if source.n_now]
    return max(now, key=lambda s: (s.n_now, s.n_now == s.n_held), default=None)


def _load(offers: Items[Offer], n_live: int) -> Restore | None:
    best, n_best = None, n_live
    for tier, hit, min_gain in offers:
        if hit.n_tokens >= n_best + min_gain:
            best, n_best = Restore(tier, hit, n_live), hit.n_tokens
    return best
