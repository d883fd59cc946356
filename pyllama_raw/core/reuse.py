"""
Where a sequence that gets a slot takes its first tokens from.

In this order of preference: the memory of a slot, running or idle; a host snapshot if
that reaches further; a file if that reaches much further; else they are computed, also
where that is faster. A sequence whose prefix another one is computing right now waits for
it and takes it over, so n equal prompts cost one prefill. What an idle slot holds is
captured before somebody else needs the place or the cells.

Operations go into one list in the order they are decided, because they depend on each
other: a slot may be copied first and emptied later in the same step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pyllama_raw.core.cache_entry import Hit
from pyllama_raw.core.disk_tier import DiskTier
from pyllama_raw.core.namespace import Namespace
from pyllama_raw.core.prefix_cache import PrefixCache
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.slots import N_FRESH, Slot, Slots
from pyllama_raw.core.snapshot_kind import SnapshotKind
from pyllama_raw.core.snapshot_points import spaced
from pyllama_raw.core.snapshots import SnapshotCost, Snapshots
from pyllama_raw.core.sources import Source, find_source
from pyllama_raw.core.speed import CopySpeed, PrefillSpeed
from pyllama_raw.core.step import Copy, Operation, Release, StepResult, Trim

Tier = Snapshots | DiskTier

MIN_WAIT = 16  # tokens that waiting for a leader must save


class Restoring(NamedTuple):
    """A copy that the next step makes; it counts as a hit once it has worked."""

    tier: Tier
    hit: Hit
    n_live: int  # tokens that were also in a slot


class PrefixReuse:
    """Fills new sequences from what is known; keeps what may be of use."""

    def __init__(
        self,
        slots: Slots,
        cache: PrefixCache,
        disk: DiskTier,
        operations: list[Operation],
        prefill: PrefillSpeed,
        *,
        cost: SnapshotCost,
        interval: int,
        keeps: bool,
    ) -> None:
        """
        Args:
            interval: tokens between regular snapshots of memory that cannot be cut.
            keeps: whether anything is reused at all.
        """
        self.keeps = keeps
        self.min_wait = MIN_WAIT
        self.cache = cache
        self.disk = disk
        self._slots = slots
        self._operations = operations
        self._speeds = {
            CacheTier.HOST: CopySpeed(prefill),
            CacheTier.DISK: CopySpeed(prefill),
        }
        self._restoring: dict[int, Restoring] = {}  # by slot
        self._emptied: list[Sequence] = []  # whose slot turned out to hold nothing
        self._copies = True  # whether there may be snapshots and files
        self._snapshots = Snapshots(
            cache, operations, cost=cost, interval=interval, limits=slots.limits
        )

    # -- a sequence gets its tokens ----------------------------------------------

    def place(self, sequence: Sequence) -> None:
        """Give *sequence* the idle slot that suits it best, and its prefix."""
        # Rows of tokens that are not computed could not be scored.
        keeps = self.keeps and not sequence.is_scoring
        source = find_source(self._slots, sequence) if keeps else None
        if source is not None and self._takes_over(source, sequence):
            slot = source.slot
            if source.n_now < slot.n_left:
                self._save(slot)
                self._slots.trim(slot, source.n_now)
                self._operations.append(Trim(slot.index, source.n_now))
            self._slots.place(sequence, slot)
            self._note_cached(sequence, CacheTier.LIVE)
            self.cache.record(self._match(sequence), source.n_now)
            self._snapshots.plan_points(sequence)
            return
        idle = self._slots.idle
        free = [s for s in idle if source is None or s is not source.slot] or idle
        self._evict(free[0])
        self._slots.place(sequence, free[0])
        if keeps:  # what has left the slot may have been the source
            self._fill(sequence, source and find_source(self._slots, sequence))

    def advance(self) -> None:
        """Fill who has lost its tokens; who waits for a leader takes over what it has."""
        if self._emptied:
            self._refill()
        for sequence in self._slots.running:
            leader = sequence.leader
            if leader is None:
                continue
            missed = not self._can_cut and leader.n_computed > sequence.fork_at
            if missed or leader.slot is None or leader.is_shifted:
                sequence.leader = None
                self._fill(sequence, find_source(self._slots, sequence))
            elif leader.n_computed >= sequence.fork_at:
                sequence.leader = None
                self.cache.record(self._match(sequence), sequence.fork_at)
                self._copy(
                    self._slots.all[leader.slot or 0], sequence, sequence.fork_at
                )
                self._snapshots.plan_points(sequence)

    @property
    def _can_cut(self) -> bool:
        return self._slots.limits.can_cut

    def _takes_over(self, source: Source, sequence: Sequence) -> bool:
        """
        Whether to go on in the slot of *source* instead of copying out of it.

        A prompt that is asked again does: what it cuts off is an earlier answer.
        """
        if source.slot.sequence is not None or source.n_now == 0:
            return False
        kept, _ = self._kept(sequence, source.n_now)
        if kept.n_tokens >= source.n_now + self.disk.min_gain:
            return False
        if source.n_now == source.slot.n_left:
            return True
        has_prompt = source.n_now == sequence.n_in_chunks - N_FRESH
        return self._can_cut and (has_prompt or len(self._slots.idle) == 1)

    def _fill(self, sequence: Sequence, source: Source | None) -> None:
        """Take the prefix of *sequence*, whose slot is empty, from *source* or copies."""
        n_live = source.n_now if source else 0
        hit, tier = self._kept(sequence, n_live)
        best = max(n_live, hit.n_tokens)
        if source is not None and source.n_later >= best + self.min_wait:
            self._follow(sequence, source)
            return
        if hit.n_tokens > n_live:
            self._restore(sequence, Restoring(tier, hit, n_live))
        else:
            tier.cache.record(hit, n_live)
            if source is not None and n_live:
                self._copy(source.slot, sequence, n_live)
        self._snapshots.plan_points(sequence)

    def _follow(self, sequence: Sequence, source: Source) -> None:
        """
        Wait for the sequence in the slot of *source*.

        Its chunk ends where the two part: from there on both go on together, and what
        goes on together needs fewer steps.
        """
        leader = source.slot.sequence
        assert leader is not None
        sequence.leader, sequence.fork_at = leader, source.n_later
        if self._can_cut and leader.n_in_chunks - source.n_later < N_FRESH:
            return  # no chunk can end there
        points = {*leader.points, source.n_later}
        leader.points = spaced(points, leader.n_computed, N_FRESH)
        if not self._can_cut:
            sequence.fork_at = max(p for p in leader.points if p <= source.n_later)

    def _copy(self, src: Slot, sequence: Sequence, n_tokens: int) -> None:
        self._slots.share(src, sequence, n_tokens)
        self._operations.append(Copy(src.index, sequence.slot or 0, n_tokens))
        self._note_cached(sequence, CacheTier.LIVE)

    def _note_cached(self, sequence: Sequence, tier: CacheTier) -> None:
        if sequence.n_computed and not (sequence.n_output or sequence.n_preempted):
            sequence.n_cached, sequence.cache_tier = sequence.n_computed, tier

    def _kept(self, sequence: Sequence, n_live: int) -> tuple[Hit, Tier]:
        """
        The most that is kept of *sequence*, if it fits and a restore pays.

        A file has to have much more than memory.
        """
        hit = self._match(sequence)
        if not self._copies:
            return replace(hit, n_tokens=0, spans=()), self._snapshots
        if hit.n_tokens > n_live and not (
            self._fits(hit) and self._pays(hit, CacheTier.HOST, n_live)
        ):
            hit = replace(hit, n_tokens=0, spans=())
        file = self.disk.match(sequence, N_FRESH)
        best = max(hit.n_tokens, n_live)
        if (
            file.n_tokens >= best + self.disk.min_gain
            and self._fits(file)
            and self._pays(file, CacheTier.DISK, best)
        ):
            return file, self.disk
        return hit, self._snapshots

    def _pays(self, hit: Hit, tier: CacheTier, n_known: int) -> bool:
        """Whether *hit* is sooner restored than what it has beyond *n_known* computed."""
        return self._speeds[tier].pays(hit.n_bytes, hit.n_tokens - n_known)

    def _fits(self, hit: Hit) -> bool:
        """Whether there are cells for *hit*, if idle slots give theirs."""
        n_cells = _n_cells(hit)
        slots = self._slots
        return n_cells <= slots.n_free_cells or n_cells <= slots.n_not_running

    def _match(self, sequence: Sequence) -> Hit:
        return self._snapshots.match(sequence, N_FRESH)

    def _restore(self, sequence: Sequence, restoring: Restoring) -> None:
        tier, hit, _ = restoring
        tier.cache.pin(hit)
        self.reclaim(_n_cells(hit))
        self._slots.rewind(sequence, hit.n_tokens)
        slot = sequence.slot or 0
        self._operations.append(tier.restore(slot, hit))
        self._restoring[slot] = restoring
        self._note_cached(sequence, tier.tier)

    # -- before and after a step -------------------------------------------------

    def reach(self, sequence: Sequence) -> None:
        """Capture *sequence* if it stands at one of its points. Call before it goes on."""
        self._snapshots.reach(self._slots.all[sequence.slot or 0])

    def reclaim(self, n_cells: int) -> None:
        """Empty idle slots, the longest unused first, until *n_cells* are free."""
        if self._slots.n_free_cells >= n_cells:
            return
        for slot in self._slots.idle:
            if self._slots.n_free_cells >= n_cells:
                return
            self._evict(slot)

    def _evict(self, slot: Slot) -> None:
        if slot.n_left:
            self._save(slot)
            self._slots.empty(slot)
            self._operations.append(Release(slot.index))

    def _save(self, slot: Slot) -> None:
        """Keep what an idle slot holds, before somebody else needs the place."""
        if slot.is_usable and self._copies:
            self._snapshots.save(slot)
        self._operations += self.writes(slot)

    def writes(self, slot: Slot) -> list[Operation]:
        """What keeps in files what an idle slot holds."""
        if not self._copies:
            return []
        writes = self.disk.export(slot, self.cache)
        if slot.is_usable:
            writes += self.disk.save(slot, self.cache)
        return writes

    def settle(self, result: StepResult) -> None:
        """Take in which captures and restores of the step have worked."""
        for index, (tier, hit, n_live) in self._restoring.items():
            if index not in result.not_restored:
                seconds = result.restore_s.get(index, 0.0)
                self._speeds[tier.tier].observe(hit.n_bytes, seconds)
                tier.cache.record(hit, n_live)
            elif (sequence := self._slots.all[index].sequence) is not None:
                self._emptied.append(sequence)  # the next best may be had
        self._restoring.clear()
        self._snapshots.settle(result)
        self.disk.settle(result)
        for index in result.not_restored:
            self._lose(self._slots.all[index])

    def _lose(self, slot: Slot) -> None:
        """The slot turned out to be empty."""
        sequence = slot.sequence
        if sequence is None:
            self._slots.empty(slot)
            return
        self._slots.rewind(sequence, 0)
        if not (sequence.n_output or sequence.n_preempted):
            sequence.n_cached, sequence.cache_tier = 0, None

    def _refill(self) -> None:
        """Fill slots that turned out to be empty from what is left."""
        emptied, self._emptied = self._emptied, []
        for sequence in emptied:
            if sequence.slot is not None and not sequence.n_computed:
                sequence.leader = None
                if self.keeps and not sequence.is_scoring:
                    self._fill(sequence, find_source(self._slots, sequence))

    def forget_idle(self, namespace: Namespace | None) -> None:
        """Empty the idle slots of *namespace*, None: all; nothing is captured."""
        for slot in self._slots.idle:
            if slot.n_left and namespace in (None, slot.namespace):
                self._slots.empty(slot)
                self._operations.append(Release(slot.index))

    def forbid_cuts(self) -> None:
        """
        The memory has refused to forget a part of a slot: none is asked for any more.

        Slots are of use as a whole from now on. Snapshots and files were made to be cut, so
        there are none.
        """
        limits = self._slots.limits
        if limits.can_cut:
            kind = SnapshotKind.EXACT
            self._slots.limits = replace(limits, kind=kind, can_shift=False)
            self._copies = False
            self.cache.clear()

    def forget_slots(self) -> None:
        """The context is new: no slot holds anything, and who runs is to be filled again."""
        self._operations.clear()
        for slot in self._slots.all:
            self._lose(slot)
        for sequence in self._slots.running:
            sequence.leader = None
            sequence.points.clear()
            sequence.deficit = 0
        self._emptied = sorted(self._slots.running, key=lambda s: s.rank)


def _n_cells(hit: Hit) -> int:
    """Cells a restore takes: a piece is restored whole before its end is cut off."""
    return max((entry.stop for entry in hit.entries), default=0)
