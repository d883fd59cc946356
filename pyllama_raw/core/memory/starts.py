"""
Starts: what a sequence begins with when it gets a slot.

In this order of preference: the memory of a slot, running or idle; a host snapshot if that
reaches further; a file if that reaches much further; else its tokens are computed, also
where that is faster. A sequence whose prefix another one is computing right now waits for it
and takes it over, so n equal prompts cost one prefill.
"""

from __future__ import annotations

from dataclasses import replace

from pyllama_raw.core.exact import N_FRESH
from pyllama_raw.core.memory.placement import (
    CopyOf,
    Follow,
    Offer,
    Placement,
    Question,
    Restore,
    Source,
    TakeOver,
    fill,
    place,
)
from pyllama_raw.core.memory.restores import Restores
from pyllama_raw.core.memory.slots import Slots
from pyllama_raw.core.memory.snapshot_points import Points, spaced
from pyllama_raw.core.memory.sources import Prefixes, find_sources, n_reusable
from pyllama_raw.core.memory.swaps import Swaps
from pyllama_raw.core.memory.tiers import Tiers
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Running, Sequence

MIN_WAIT = 16  # tokens that waiting for a leader must save


class Starts:
    """
    Finds what there is of a sequence, and gives it that.

    Args:
        keeps: whether anything is reused at all.
    """

    def __init__(
        self,
        slots: Slots,
        tiers: Tiers,
        points: Points,
        restores: Restores,
        swaps: Swaps,
        *,
        keeps: bool,
    ) -> None:
        self.min_wait = MIN_WAIT
        self._slots = slots
        self._tiers = tiers
        self._points = points
        self._restores = restores
        self._swaps = swaps
        self.keeps = keeps

    def place(self, sequence: Sequence) -> tuple[int, Placement]:
        """The idle slot that suits *sequence* best, and what it starts from there."""
        idle = [idle.slot for idle in self._slots.idle]
        slot, placement = place(*self._search(sequence), idle)
        if (swapped := self._swapped(sequence, placement)) is not None:
            slot, placement = idle[0], swapped
        self._hold(placement)  # before what is evicted displaces it
        return slot, placement

    def fill(self, running: Running) -> None:
        """Decide again what *running*, whose slot is empty, starts from."""
        running.leader = None
        placement = fill(*self._search(running.sequence))
        placement = self._swapped(running.sequence, placement) or placement
        self._hold(placement)
        self.start(running, placement)

    def _swapped(self, sequence: Sequence, placement: Placement) -> Restore | None:
        """Restore what *sequence* had before, unless slots have as much of it."""
        found = self._swaps.find(sequence)
        n_live = placement.n_tokens if isinstance(placement, TakeOver | CopyOf) else 0
        return found if found and found.hit.n_tokens > n_live + N_FRESH else None

    def catch_up(self, running: Running, leader: Running) -> None:
        """*running* takes over what it waits for; *leader* may never have it."""
        n_tokens, can_cut = running.fork_at, self._slots.limits.can_cut
        missed = not can_cut and leader.n_computed > n_tokens
        if missed or leader.sequence.is_shifted or not self._slots.is_here(leader):
            self.fill(running)
        elif leader.n_computed >= n_tokens:
            running.leader = None
            self.start(running, CopyOf(leader.slot, n_tokens))

    def start(self, running: Running, placement: Placement) -> None:
        """Do what was decided for *running*."""
        match placement:
            case Restore():
                self._restores.begin(running, placement)
            case Follow(slot, n_tokens):
                self._follow(running, slot, n_tokens)
            case _:
                if isinstance(placement, CopyOf):
                    self._slots.copy(placement.slot, running, placement.n_tokens)
                running.note_cached(CacheTier.LIVE)
                self._count_live(running)
                self._points.plan(running)

    def _search(self, sequence: Sequence) -> tuple[Question, list[Source], list[Offer]]:
        """Search slots for *sequence*, and the tiers for what there is room for."""
        n_most, can_cut = n_reusable(sequence), self._slots.limits.can_cut
        wanted = Question(n_most, can_cut, self.min_wait, self._tiers.disk.min_gain)
        if not self.keeps or sequence.is_scoring:
            return wanted, [], []  # tokens that are not computed could not be scored
        offers = self._tiers.offers(sequence, n_most, self._n_cells)
        return wanted, find_sources(self._slots, sequence), offers

    def _n_cells(self) -> int:
        return self._slots.n_not_running

    def n_cached(self, sequence: Sequence, prefixes: Prefixes) -> int:
        """
        Tokens of a waiting *sequence* that it would not have to compute now.

        Args:
            prefixes: of this moment; many sequences can be asked about with them.
        """
        if not self.keeps or sequence.is_scoring:
            return 0
        n_most = n_reusable(sequence)
        offers = self._tiers.offers(sequence, n_most, self._n_cells)
        if self._slots.limits.can_cut:
            found = [prefixes.n_longest(sequence, n_most)]
        else:
            found = [each.n_later for each in find_sources(self._slots, sequence)]
        found += [offer.hit.n_tokens for offer in offers]
        return max(found, default=0)

    def _hold(self, placement: Placement) -> None:
        if isinstance(placement, Restore):
            self._tiers.hold(placement)

    def _count_live(self, running: Running) -> None:
        """Nothing was restored of *running*; a slot had what it holds."""
        sequence = running.sequence
        if self.keeps and not sequence.is_scoring:
            hit = self._tiers.host.match(sequence, n_reusable(sequence))
            if hit.n_tokens > running.n_computed:
                hit = replace(hit, n_tokens=0, spans=())
            self._tiers.host.cache.record(hit, running.n_computed)

    def _follow(self, running: Running, slot: int, n_tokens: int) -> None:
        """
        Wait for the sequence in *slot*, until it has *n_tokens*.

        Its chunk ends where the two part: from there on both go on together, and what
        goes on together needs fewer steps.
        """
        leader, can_cut = self._slots.all[slot], self._slots.limits.can_cut
        assert isinstance(leader, Running)
        running.leader, running.fork_at = leader, n_tokens
        if can_cut and leader.sequence.n_in_chunks - n_tokens < N_FRESH:
            return  # no chunk can end there
        points = {*leader.points, n_tokens}
        leader.points = spaced(points, leader.n_computed, N_FRESH)
        if not can_cut:
            running.fork_at = max(p for p in leader.points if p <= n_tokens)
