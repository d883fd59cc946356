"""
What sequences have in memory: where they sit, what they take over, what is kept.

A sequence that gets a slot takes its first tokens, in this order of preference, from the
memory of a slot, running or idle; from a host snapshot if that reaches further; from a file
if that reaches much further; else they are computed, also where that is faster. A sequence
whose prefix another one is computing right now waits for it and takes it over, so n equal
prompts cost one prefill. What an idle slot holds is captured before somebody else needs the
place or the cells.

Moves go into one list in the order they are decided, because they depend on each other: a
slot may be copied first and emptied later in the same step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

from pyllama_raw.core.exact import N_FRESH
from pyllama_raw.core.limits import ContextLimits
from pyllama_raw.core.memory.cache_stats import CacheStats
from pyllama_raw.core.memory.placement import (
    CopyOf,
    Follow,
    Offer,
    Placement,
    Restore,
    Source,
    TakeOver,
    Wanted,
    fill,
    place,
)
from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.memory.slots import Slot, Slots, growth, slot_of
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.memory.snapshot_points import Points, spaced
from pyllama_raw.core.memory.sources import find_sources, n_reusable
from pyllama_raw.core.memory.tier import SnapshotCost, Tier
from pyllama_raw.core.memory.tiers import Loading, Tiers, n_cells_of
from pyllama_raw.core.namespace import Namespace
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.speed import PrefillSpeed
from pyllama_raw.core.step import (
    Copy,
    Fetched,
    Move,
    Release,
    Shift,
    StepResult,
    Trim,
    Written,
)

MIN_WAIT = 16  # tokens that waiting for a leader must save
LOAD_TOKENS = 128  # of a file, in a step of others


class Memory:
    """
    The one owner of slots, snapshots and files.

    Rules:
    1. Nobody else writes what a slot holds or how much of a sequence is computed.
    2. Each change leaves behind what the context has to do about it. take_moves() hands
       that out once, in order; the plan with these moves is the next one that is executed,
       and settle() comes before any other change.
    3. What is kept, on its way or lent is within its limit at every moment.
    4. A save or a load that fails is a miss: settle() is told, and the sequence is filled
       from the next best.
    """

    def __init__(
        self,
        limits: ContextLimits,
        *,
        cache: PrefixCache | None,
        disk: Tier | None,
        prefill: PrefillSpeed,
        cost: SnapshotCost,
        interval: int,
    ) -> None:
        """
        Args:
            cache: None: slots forget what they held as soon as a sequence leaves.
            disk: None: nothing is kept in files.
            interval: tokens between regular snapshots of memory that cannot be cut.
        """
        self.keeps = cache is not None  # whether anything is reused at all
        self.min_wait = MIN_WAIT
        self.load_tokens = LOAD_TOKENS
        self.cache = cache or PrefixCache(limits.kind, max_bytes=0, max_entries=0)
        self.disk = disk or Tier.without_files()
        host = Tier(CacheTier.HOST, self.cache, cost.bound)
        self._tiers = Tiers(host, self.disk, prefill)
        self._points = Points(self.cache, limits, interval)
        self._slots = Slots(limits)
        self._moves: list[Move] = []
        self._fetchers: dict[int, Sequence] = {}  # who waits for a file, by fetch_id
        self._loads: dict[int, Loading] = {}  # files that were read, by fetch_id
        self._emptied: list[Sequence] = []  # whose slot turned out to hold nothing

    # -- what there is -------------------------------------------------------------

    @property
    def limits(self) -> ContextLimits:
        """What the context can hold and do, as far as is known."""
        return self._slots.limits

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a slot, in the order of slots; a change makes another list."""
        return self._slots.running

    @property
    def has_free(self) -> bool:
        """Whether another sequence may have a slot."""
        return self._slots.has_free

    @property
    def n_cells_used(self) -> int:
        return self._slots.cells.n_used

    @property
    def n_free_cells(self) -> int:
        """Cells the next step may fill; a split slot never lacks any."""
        return self._slots.n_free_cells

    @property
    def n_unpromised(self) -> int:
        """Cells that no running sequence needs; idle slots have to give theirs."""
        return self._slots.n_unpromised

    def promise(self, sequence: Sequence) -> int:
        """Cells that *sequence* will need soon: its tokens behind and some output."""
        return growth(sequence)

    @property
    def is_fetching(self) -> bool:
        """Whether a sequence with a slot waits for a file."""
        return bool(self._fetchers)

    @property
    def is_loading(self) -> bool:
        """Whether the next plan loads more of a file."""
        return bool(self._loads)

    def take_moves(self) -> tuple[Move, ...]:
        """What the context has to do before it computes anything, in this order."""
        moves, self._moves = self._moves, []
        return (*moves, *self._tiers.deletions())

    def last_moves(self) -> Iterator[tuple[Move, ...]]:
        """
        What writes to files what idle slots hold, when nobody runs.

        Each is to be done and settled before the next one is asked for. The first does what
        ended sequences have left to do: until then the context holds more than slots say.
        """
        if self._moves:
            yield self.take_moves()
        for slot in self._slots.idle:
            if writes := self._writes(slot):
                yield tuple(writes)

    # -- a sequence gets its tokens ----------------------------------------------

    def seat(self, sequence: Sequence) -> None:
        """Give *sequence* the idle slot that suits it best, and its prefix."""
        slots = self._slots
        idle = [slot.index for slot in slots.idle]
        sources, offers = self._search(sequence)
        index, placement = place(self._wanted(sequence), sources, offers, idle)
        slot = slots.all[index]
        if isinstance(placement, Restore):  # before what is evicted displaces it
            self._tiers.hold(placement)
        if isinstance(placement, TakeOver):
            self._cut(slot, placement.n_tokens)
        else:
            self._evict(slot)
        slots.place(sequence, slot)
        self._start_from(sequence, placement)

    def catch_up(self) -> None:
        """
        Fill who has lost its tokens; who waits for a leader takes over what it has.

        Called once a step, before anything is planned of it.
        """
        self._take_fetched()
        if self._loads:
            self._load_file()
        if self._emptied:
            self._refill()
        for sequence in self._slots.running:
            leader = sequence.leader
            if leader is None:
                continue
            missed = not self._can_cut and leader.n_computed > sequence.fork_at
            if missed or leader.slot is None or leader.is_shifted:
                self._fill(sequence)
            elif leader.n_computed >= sequence.fork_at:
                sequence.leader = None
                placement = CopyOf(slot_of(leader), sequence.fork_at)
                self._start_from(sequence, placement)

    @property
    def _can_cut(self) -> bool:
        return self._slots.limits.can_cut

    def _fill(self, sequence: Sequence) -> None:
        """Decide again what *sequence*, whose slot is empty, starts from."""
        sequence.leader = None
        placement = fill(self._wanted(sequence), *self._search(sequence))
        if isinstance(placement, Restore):
            self._tiers.hold(placement)
        self._start_from(sequence, placement)

    def _wanted(self, sequence: Sequence) -> Wanted:
        return Wanted(
            n_reusable(sequence), self._can_cut, self.min_wait, self.disk.min_gain
        )

    def _search(self, sequence: Sequence) -> tuple[list[Source], list[Offer]]:
        """What slots have of *sequence*, and what the tiers have that there is room for."""
        if not self.keeps or sequence.is_scoring:
            return [], []  # rows of tokens that are not computed could not be scored
        n_most, n_cells = n_reusable(sequence), self._slots.n_not_running
        offers = self._tiers.offers(sequence, n_most, n_cells)
        return find_sources(self._slots, sequence), offers

    def _start_from(self, sequence: Sequence, placement: Placement) -> None:
        """Do what was decided for *sequence*, which has a slot."""
        match placement:
            case TakeOver(_, n_tokens):
                self._note_cached(sequence, CacheTier.LIVE)
                self._count_live(sequence, n_tokens)
            case CopyOf(slot, n_tokens):
                self._copy(slot, sequence, n_tokens)
            case Restore(CacheTier.DISK):
                self._fetch(sequence, placement)
                return
            case Restore():
                self._add(sequence, Loading(placement), placement.hit.n_tokens)
                return
            case Follow(slot, n_tokens):
                self._follow(sequence, self._slots.all[slot], n_tokens)
                return
            case _:  # Cold
                self._count_live(sequence, 0)
        self._points.plan(sequence)

    def _count_live(self, sequence: Sequence, n_tokens: int) -> None:
        """Nothing was restored of *sequence*; a slot had its first *n_tokens*."""
        if self.keeps and not sequence.is_scoring:
            hit = self._tiers.host.match(sequence, n_reusable(sequence))
            if hit.n_tokens > n_tokens:
                hit = replace(hit, n_tokens=0, spans=())
            self.cache.record(hit, n_tokens)

    def _follow(self, sequence: Sequence, source: Slot, n_tokens: int) -> None:
        """
        Wait for the sequence in *source*, until it has *n_tokens*.

        Its chunk ends where the two part: from there on both go on together, and what
        goes on together needs fewer steps.
        """
        leader = source.sequence
        assert leader is not None
        sequence.leader, sequence.fork_at = leader, n_tokens
        if self._can_cut and leader.n_in_chunks - n_tokens < N_FRESH:
            return  # no chunk can end there
        points = {*leader.points, n_tokens}
        leader.points = spaced(points, leader.n_computed, N_FRESH)
        if not self._can_cut:
            sequence.fork_at = max(p for p in leader.points if p <= n_tokens)

    def _copy(self, src: int, sequence: Sequence, n_tokens: int) -> None:
        self._slots.share(self._slots.all[src], sequence, n_tokens)
        self._moves.append(Copy(src, slot_of(sequence), n_tokens))
        self._note_cached(sequence, CacheTier.LIVE)
        self._count_live(sequence, n_tokens)

    def _note_cached(self, sequence: Sequence, tier: CacheTier) -> None:
        if sequence.n_computed and not (sequence.n_output or sequence.n_preempted):
            sequence.n_cached, sequence.cache_tier = sequence.n_computed, tier

    def _fetch(self, sequence: Sequence, chosen: Restore) -> None:
        """Have a file read while *sequence* waits with an empty slot."""
        fetch = self._tiers.fetch(chosen)
        self._moves.append(fetch)
        self._fetchers[fetch.fetch_id] = sequence
        sequence.fetch_id = fetch.fetch_id

    def _take_fetched(self) -> None:
        """Take in what was read, for those who still wait for it."""
        for fetch_id, loading in self._tiers.take_fetched():
            sequence = self._fetchers.get(fetch_id)
            if loading is not None and sequence is not None:
                self._loads[fetch_id] = loading
            elif loading is not None:
                self._tiers.let_go(loading.chosen)
            elif sequence is not None:
                self._end_fetch(sequence)
                self._emptied.append(sequence)

    def _load_file(self) -> None:
        """Load what was read first: a portion while others go on, if memory has portions."""
        fetch_id, loading = next(iter(self._loads.items()))
        sequence, hit = self._fetchers[fetch_id], loading.chosen.hit
        start, stop = sequence.n_computed, hit.n_tokens
        has_portions = self.limits.kind is SnapshotKind.RANGE
        if has_portions and len(self.running) > len(self._fetchers):
            stop = min(stop, start + self.load_tokens)
        has_cells = n_cells_of(hit) - start <= self._slots.n_not_running
        if not (has_cells and self._tiers.is_open):
            self._end_fetch(sequence)
            self.rewind(sequence, 0)
            self._emptied.append(sequence)
            return
        if stop == hit.n_tokens:
            del self._loads[fetch_id]
            self._end_fetch(sequence)
        self._add(sequence, loading, stop)

    def _end_fetch(self, sequence: Sequence, *, failed: bool = False) -> None:
        """*sequence* does not wait for a file any more."""
        assert sequence.fetch_id is not None
        del self._fetchers[sequence.fetch_id]
        loading = self._loads.pop(sequence.fetch_id, None)
        if loading is not None:
            self._tiers.let_go(loading.chosen, failed=failed)
        sequence.fetch_id = None

    def _add(self, sequence: Sequence, loading: Loading, stop: int) -> None:
        """Fill the slot of *sequence* from host memory, up to *stop*."""
        start, hit = sequence.n_computed, loading.chosen.hit
        self.reclaim(n_cells_of(hit) - start)
        self._slots.rewind(sequence, stop)
        self._moves.append(self._tiers.load(slot_of(sequence), loading, start, stop))
        if stop == hit.n_tokens:
            self._note_cached(sequence, loading.chosen.tier)
            self._points.plan(sequence)

    # -- a sequence goes on and leaves ---------------------------------------------

    def advance(self, sequence: Sequence, n_tokens: int) -> None:
        """The next *n_tokens* of a running *sequence* were computed."""
        self._slots.advance(sequence, n_tokens)

    def rewind(self, sequence: Sequence, n_computed: int) -> None:
        """Forget all but the first *n_computed* tokens of a running *sequence*."""
        self._slots.rewind(sequence, n_computed)
        self._moves.append(Trim(slot_of(sequence), n_computed))

    def shift(self, sequence: Sequence, n_keep: int, n_discard: int) -> bool:
        """
        Drop tokens from the middle of a running *sequence*.

        False: all of it is to be computed again, because cells have one position for all who
        share them, or this memory cannot shift.
        """
        slot = slot_of(sequence)
        if self._slots.cells.is_shared(slot) or not self.limits.can_shift:
            self._slots.shift(sequence, n_keep, n_discard)
            self.rewind(sequence, 0)
            return False
        self._slots.shift(sequence, n_keep, n_discard)
        self._moves.append(Shift(slot, n_keep, n_discard))
        return True

    def leave(self, sequence: Sequence, *, in_flight: bool) -> None:
        """
        Take the slot of *sequence*, which keeps what others may take over.

        Args:
            in_flight: a step that was planned still changes the slot: nothing is kept.
        """
        keep = self.keeps and not (in_flight or sequence.is_shifted)
        n_kept = self.limits.n_kept(sequence)
        slot = self._slots.depart(sequence, keep=keep)
        sequence.leader = None
        if sequence.fetch_id is not None:
            self._end_fetch(sequence)
        sequence.points.clear()
        if not keep:
            self._moves.append(Release(slot.index))
        elif self.limits.can_cut and n_kept < slot.n_left:
            self._slots.trim(slot, n_kept)
            self._moves.append(Trim(slot.index, n_kept))

    # -- before and after a step -------------------------------------------------

    def reach(self, sequence: Sequence) -> None:
        """Capture *sequence* if it stands at one of its points. Call before it goes on."""
        if self._points.reach(sequence):
            tokens = sequence.tokens[: sequence.n_computed]
            namespace = sequence.request.namespace
            self._moves += self._tiers.save(slot_of(sequence), namespace, tokens)

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
            self._moves.append(Release(slot.index))

    def _cut(self, slot: Slot, n_tokens: int) -> None:
        """Keep the first *n_tokens* of an idle slot only, after all of it was saved."""
        if n_tokens < slot.n_left:
            self._save(slot)
            self._slots.trim(slot, n_tokens)
            self._moves.append(Trim(slot.index, n_tokens))

    def _save(self, slot: Slot) -> None:
        """Keep what an idle slot holds, before somebody else needs the place."""
        if slot.is_usable:
            tokens = array("i", slot.left)
            self._moves += self._tiers.save(slot.index, slot.namespace, tokens)
        self._moves += self._writes(slot)

    def _writes(self, slot: Slot) -> list[Move]:
        """What keeps in files what an idle slot holds."""
        tokens = array("i", slot.left)
        return self._tiers.write(
            slot.index, slot.namespace, tokens, is_whole=slot.is_usable
        )

    def settle(self, result: StepResult) -> None:
        """Take in which moves of the step have worked."""
        for index in self._tiers.settle(result):
            if (sequence := self._slots.all[index].sequence) is not None:
                if sequence.fetch_id is not None:
                    self._end_fetch(sequence, failed=True)
                self._emptied.append(sequence)  # the next best may be had
        for index in result.not_restored:
            self._lose(self._slots.all[index])
        if result.refuses_cuts:
            self._forbid_cuts()

    def take_report(self, report: Written | Fetched) -> None:
        """What came of a file, after the step that asked for it."""
        self._tiers.take_report(report)

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
            waits = sequence.slot is None or sequence.fetch_id is not None
            if not (waits or sequence.n_computed):
                self._fill(sequence)

    def clear(self, namespace: Namespace = None) -> int:
        """
        Forget snapshots, files and idle slots of *namespace*, None: all.

        Returns the host bytes freed.
        """
        for slot in self._slots.idle:
            if slot.n_left and namespace in (None, slot.namespace):
                self._slots.empty(slot)
                self._moves.append(Release(slot.index))
        return self._tiers.clear(namespace)

    def _forbid_cuts(self) -> None:
        """
        The memory has refused to forget a part of a slot: none is asked for any more.

        Slots are of use as a whole from now on. Snapshots and files were made to be cut, so
        there are none.
        """
        limits = self._slots.limits
        if limits.can_cut:
            kind = SnapshotKind.EXACT
            self._slots.limits = replace(limits, kind=kind, can_shift=False)
            self._tiers.close()

    def stats(self) -> CacheStats:
        """What was reused and what is stored."""
        return replace(self.cache.stats(), disk=self.disk.cache.stats())

    def check_integrity(self) -> None:
        """The conservation laws; raises AssertionError."""
        self._slots.check_integrity()
        self._tiers.check_integrity()
        for fetch_id, sequence in self._fetchers.items():
            assert sequence.fetch_id == fetch_id
            assert sequence in self.running
            assert sequence.n_computed == 0 or fetch_id in self._loads

    def forget_slots(self) -> None:
        """The context is new: no slot holds anything, and who runs is to be filled again."""
        self._moves = []
        for slot in self._slots.all:
            self._lose(slot)
        for sequence in self._slots.running:
            sequence.leader = None
            sequence.points.clear()
            sequence.deficit = 0
        self._emptied = sorted(self._slots.running, key=lambda s: s.rank)
