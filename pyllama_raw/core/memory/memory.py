"""
Memory: what sequences have of the context, and what is saved of them for later.

A sequence gets a slot by seat(), goes on by catch_up(), reach() and reclaim(), and
loses its slot by leave(). `Slots` counts and moves, `placement` decides from what a
sequence starts, and `Tiers` has what is saved in host memory and in files.

Rules:
1. `slots` alone writes what a slot holds, and the moves that it takes.
2. take_moves() hands these out once, in order; the plan with them is the next one that
   is executed, and settle() comes before any other change.
3. What is saved, on its way or lent is within its limit at every moment.
4. A save or a load that fails is a miss: settle() takes it in, and the sequence is
   filled from the next best.
5. A swap is what a preempted sequence had, saved in host memory if its bytes are sooner
   saved and loaded than its tokens are computed. It is held until its sequence has it
   again or ends. With `deterministic` others must not have output, so a swap has a
   namespace of its own.
6. Memory that cannot be cut is captured on the way, at points of a prompt where its
   chunks end.
7. While no slot is free, the file that the next sequence will need is read ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyllama_raw.core.costs import Captures, CostHistory
from pyllama_raw.core.memory.cache import PrefixCache
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
    find_sources,
    place,
)
from pyllama_raw.core.memory.slots import (
    Contents,
    ContextLimits,
    Idle,
    Slots,
    contents_of,
)
from pyllama_raw.core.memory.snapshots import (
    Hit,
    SnapshotKind,
    snapshot_points,
    spaced,
)
from pyllama_raw.core.memory.tiers import (
    EarlyFile,
    Loading,
    ReadAhead,
    SnapshotCost,
    Tier,
    Tiers,
)
from pyllama_raw.core.request import CacheTier, Namespace, Private, border, is_of
from pyllama_raw.core.sequence import (
    N_FRESH,
    Running,
    Sequence,
    n_reusable,
    take_scores,
)
from pyllama_raw.core.stats import CacheStats
from pyllama_raw.core.step import Delete, Move, Save, StepPlan, StepResult

SLOT_SAVE = 0  # the id of a copy in `StepResult.saved`; those of tiers begin at 1
MIN_WAIT = 16  # tokens that waiting for a leader must save
LOAD_TOKENS = 128  # of a file, in a step of others


@dataclass(slots=True, eq=False)
class Swap:
    """The first *n_tokens* of a sequence that lost its slot."""

    namespace: Namespace
    n_tokens: int
    hit: Hit | None = None  # held; None: not saved yet


class Memory:
    """The one owner of slots, snapshots and files."""

    def __init__(
        self,
        limits: ContextLimits,
        *,
        cache: PrefixCache | None,
        disk: Tier | None,
        prefill: CostHistory,
        cost: SnapshotCost,
        interval: int,
        target_step_s: float,
    ) -> None:
        """
        Args:
            cache: None: slots forget what they held as soon as a sequence leaves.
            disk: None: nothing is kept in files.
            interval: tokens between regular snapshots of memory that cannot be cut.
        """
        self.min_wait, self.load_tokens = MIN_WAIT, LOAD_TOKENS
        self.reuses = cache is not None  # whether sequences share anything at all
        self.cell_bytes = cost.token_bytes  # as measured of states; 0: not by the token
        self.n_swapped = self.n_swapped_bytes = 0  # since the start
        self.slots = Slots(limits)
        self.cache = cache or PrefixCache(limits.kind, max_bytes=0, max_entries=0)
        host = Tier(CacheTier.HOST, self.cache, cost.bound)
        disk = disk or Tier.without_files()
        self.ledgers = self.cache.ledger, disk.cache.ledger  # what host and files hold
        self.captures = Captures(cost.price, prefill, target_step_s, cost.token_bytes)
        self.tiers = Tiers(host, disk, prefill, self.captures, cost.price)
        self._interval = interval
        self._captures_points = self.cache.stores and not limits.kind.can_cut
        self._swaps: dict[Sequence, Swap] = {}  # a few: only preempted ones have any
        self._emptied: list[Running] = []  # to be filled again
        self._followers: list[Running] = []  # perhaps not any more
        # By fetch_id: sequences that wait for a file, and files that were read.
        self.fetchers: dict[int, Running] = {}
        self.loads: dict[int, Loading] = {}
        self.ahead = ReadAhead(self.tiers, disk.cache.stores)

    # -- a sequence comes ------------------------------------------------------------

    def seat(self, sequence: Sequence) -> None:
        """Give *sequence* an idle slot, and the best start that there is of it."""
        question, sources, offers = self._survey(sequence)
        free = [idle.slot for idle in self.slots.idle]
        slot, start = place(question, sources, offers, free, sequence.request.slot)
        # A start from elsewhere empties the slot, and may have the one that is wished for, too.
        empty = slot if slot == sequence.request.slot else free[0]
        if (swap := self._swap_of(sequence, start)) is not None:
            slot, start = empty, swap
        file: EarlyFile | None = None
        if self.ahead.file is not None:
            file = self.ahead.take(sequence, start, self.slots.n_not_running)
        if file is not None:
            slot, start = empty, file.restore
        # Hold it first, because what is saved of the slot might evict it.
        elif isinstance(start, Restore):
            self.tiers.hold(start)
        idle = self.slots.all[slot]
        assert isinstance(idle, Idle)
        n_tokens = start.n_tokens if isinstance(start, TakeOver) else 0
        if sequence.request.scoring is not None:
            take_scores(idle, sequence, n_tokens)
        self._cut(idle, n_tokens)
        running = self.slots.seat(sequence, slot)
        if file is None:
            self._start(running, start)
            return
        # It is on its way, or there: then catch_up() loads it.
        self.fetchers[file.fetch_id] = running
        running.fetch_id = file.fetch_id
        if file.loading is not None:
            self.loads[file.fetch_id] = file.loading

    def prefetch(self, sequence: Sequence) -> None:
        """Have the file read that *sequence*, the next to get a slot, will need."""
        if self.ahead.asks_about(sequence):
            start = fill(*self._survey(sequence))
            self.slots.add(self.ahead.read(sequence, start))

    def _survey(self, sequence: Sequence) -> tuple[Question, list[Source], list[Offer]]:
        """The question that placement answers, and what slots and tiers have."""
        can_cut = self.slots.limits.kind.can_cut
        n_most = n_reusable(sequence)
        question = Question(n_most, can_cut, self.min_wait, self.tiers.disk.min_gain)
        if not self.reuses:
            return question, [], []
        offers = self.tiers.offers(sequence, n_most, self.slots.n_not_running)
        return question, find_sources(self.slots, sequence), offers

    def _swap_of(self, sequence: Sequence, start: Placement) -> Restore | None:
        """
        Find what brings *sequence* back to where it was when it lost its slot.

        None: there is nothing, or no cells for it, or slots have as much.
        """
        swap = self._swaps.get(sequence)
        if swap is None or swap.hit is None:
            return None
        is_cleared = any(entry.node is None for entry in swap.hit.entries)
        if is_cleared or swap.hit.n_cells > self.slots.n_not_running:
            return None
        n_live = start.n_tokens if isinstance(start, TakeOver | CopyOf) else 0
        if swap.hit.n_tokens <= n_live + N_FRESH:
            return None
        return Restore(CacheTier.HOST, swap.hit, 0)

    def _start(self, running: Running, start: Placement) -> None:
        """
        Do what was decided for *running*, whose slot holds nothing else.

        What fails or never comes ends in _refill(), where it is decided anew.
        """
        match start:
            case Follow(slot, n_tokens):
                # Another sequence computes the prefix right now. *running* has no work
                # until catch_up() sees the leader there, and copies. So n equal prompts
                # cost one prefill.
                leader, can_cut = self.slots.all[slot], self.slots.limits.kind.can_cut
                assert isinstance(leader, Running)
                running.leader, running.fork_at = leader, n_tokens
                self._followers.append(running)
                # A chunk of the leader ends where the two part: from there on both go
                # on together, which needs fewer steps. Near its end no chunk can end.
                n_after = leader.sequence.n_in_chunks - n_tokens
                if n_after >= N_FRESH or not can_cut:
                    points = {*leader.points, n_tokens}
                    leader.points = spaced(points, leader.n_computed, N_FRESH)
                if not can_cut:
                    running.fork_at = max(p for p in leader.points if p <= n_tokens)
            case Restore(tier=CacheTier.DISK):
                # A file. Another thread reads it, while *running* has no work and all
                # others go on; then catch_up() loads it.
                fetch = self.tiers.fetch(start)
                self.slots.add([fetch])
                self.fetchers[fetch.fetch_id] = running
                running.fetch_id = fetch.fetch_id
            case Restore():
                # A snapshot in host memory: the next step copies it into the slot.
                self._load(running, Loading(start), start.hit.n_tokens)
            case CopyOf(slot, n_tokens):
                # Another slot has it, too. In unified memory both have the same cells.
                if running.request.scoring is not None:
                    take_scores(self.slots.all[slot], running.sequence, n_tokens)
                self.slots.copy(slot, running, n_tokens)
                self._begin(running)
            case _:
                # The slot has it already, or nothing has: what follows is computed.
                self._begin(running)

    def _begin(self, running: Running) -> None:
        """*running* computes from here on; nothing was restored of it."""
        running.note_cached(CacheTier.LIVE)
        sequence = running.sequence
        if self.reuses:
            n_most = n_reusable(sequence)
            hit = self.tiers.host.match(sequence, n_most)
            # A longer snapshot was not taken, so it is no hit.
            if hit.n_tokens > running.n_computed:
                hit = replace(hit, n_tokens=0, spans=())
            self.cache.record(hit, running.n_computed)
        if self._captures_points:
            self._plan_points(running)

    def _load(self, running: Running, loading: Loading, stop: int) -> None:
        """Fill the slot of *running* from host memory, up to *stop*."""
        start, restore = running.n_computed, loading.restore
        self.reclaim(restore.hit.n_cells - start)
        load = self.tiers.load(running, loading, stop)
        self.slots.load(running, stop, load)
        if stop == restore.hit.n_tokens:
            running.note_cached(restore.tier)
            if self._captures_points:
                self._plan_points(running)

    def _plan_points(self, running: Running) -> None:
        """Find the points of *running*, which begins or has gone on by a leap."""
        request, end_of = running.request, running.sequence.whole
        marked = list(request.cache_points)
        # Prompts part where this one leaves what is stored: the next one may, too.
        junction = self.cache.junction(request.namespace, request.tokens)
        if junction is not None:
            marked.append(junction)
        # Others may ask something else about the same image.
        marked += [span.stop for span in request.spans[-1:]]
        points = snapshot_points(request.n_prompt, self._interval, marked)
        movable = {self.slots.limits.n_movable(end_of(point)) for point in points}
        ends = {point for point in movable if end_of(point) == point}
        running.points = spaced({*ends, *running.points}, running.n_computed, N_FRESH)

    # -- a sequence goes on ------------------------------------------------------------

    def catch_up(self) -> None:
        """
        Give sequences with a slot and without a start what there is of it by now.

        Called once a step, before anything is planned of it.
        """
        # Files that were read are to be loaded, one after the other.
        if self.tiers.fetched:
            self._take_files()
        if self.loads:
            self._load_file()
        # Slots that could not be filled, or were lost, get the next best.
        emptied, self._emptied = self._emptied, []
        for running in emptied:
            waits = running.fetch_id is not None
            if self.slots.is_here(running) and not (waits or running.n_computed):
                self._refill(running)
        # Followers copy from leaders that are far enough.
        followers, self._followers = self._followers, []
        for running in followers:
            leader, n_tokens = running.leader, running.fork_at
            if leader is None or not self.slots.is_here(running):
                continue
            can_cut = self.slots.limits.kind.can_cut
            is_past = not can_cut and leader.n_computed > n_tokens
            if is_past or leader.sequence.is_shifted or not self.slots.is_here(leader):
                # The leader will never stand there.
                self._refill(running)
            elif leader.n_computed >= n_tokens:
                running.leader = None
                self._start(running, CopyOf(leader.slot, n_tokens))
            else:
                self._followers.append(running)

    def _take_files(self) -> None:
        """Take in what came of files that sequences wait for."""
        for fetch_id, loading in self.tiers.take_fetched():
            running = self.fetchers.get(fetch_id)
            if self.ahead.take_report(fetch_id, loading):
                continue  # its sequence has no slot yet
            if loading is not None and running is not None:
                self.loads[fetch_id] = loading
            elif loading is not None:
                # Its sequence has left meanwhile.
                self.tiers.let_go(loading.restore)
            elif running is not None:
                # It could not be read.
                self._end_fetch(running)
                self._emptied.append(running)

    def _refill(self, running: Running) -> None:
        """Decide again from what *running*, whose slot is empty, starts."""
        running.leader = None
        start = fill(*self._survey(running.sequence))
        start = self._swap_of(running.sequence, start) or start
        if isinstance(start, Restore):
            self.tiers.hold(start)
        self._start(running, start)

    def _load_file(self) -> None:
        """Load what was read first, or a portion of it."""
        fetch_id, loading = next(iter(self.loads.items()))
        running, hit = self.fetchers[fetch_id], loading.restore.hit
        start, stop = running.n_computed, hit.n_tokens
        # A long state is loaded in portions, one a step, as long as others go on
        # meanwhile. Only memory that consists of ranges has portions, and a span is
        # loaded as a whole.
        has_portions = self.slots.limits.kind is SnapshotKind.RANGE
        if has_portions and len(self.slots.running) > len(self.fetchers):
            end = running.sequence.whole(min(stop, start + self.load_tokens))
            if end <= start:
                end = border(running.request.spans, start) or stop
            stop = end
        has_cells = hit.n_cells - start <= self.slots.n_not_running
        if not (has_cells and self.tiers.is_open):
            # Others have taken the cells since: the next best is had, or computed.
            self._end_fetch(running)
            self.slots.rewind(running, 0)
            self._emptied.append(running)
            return
        if stop == hit.n_tokens:
            # What is held is let go by the tiers, when the last portion has worked.
            del self.loads[fetch_id]
            self._end_fetch(running)
        self._load(running, loading, stop)

    def _end_fetch(self, running: Running, *, failed: bool = False) -> None:
        """*running* does not wait for its file any more."""
        assert running.fetch_id is not None
        del self.fetchers[running.fetch_id]
        loading = self.loads.pop(running.fetch_id, None)
        if loading is not None:
            self.tiers.let_go(loading.restore, failed=failed)
        running.fetch_id = None

    def reach(self, running: Running) -> None:
        """Capture *running* if it stands at one of its points, before it goes on."""
        points, n_computed = running.points, running.n_computed
        # What was loaded may have reached further.
        while points and points[0] < n_computed:
            points.pop(0)
        if points and points[0] == n_computed:
            points.pop(0)
            if self._captures_points:
                self.slots.add(self.tiers.save(contents_of(running)))

    def reclaim(self, n_cells: int) -> None:
        """Empty idle slots, the longest unused first, until *n_cells* are free."""
        for idle in self.slots.idle:
            if self.slots.n_free_cells >= n_cells:
                return
            self._cut(idle, 0)

    def _cut(self, idle: Idle, n_tokens: int) -> None:
        """Save what pays of an idle slot, then keep its first *n_tokens* only."""
        if n_tokens < idle.n_held:
            # Else it holds an output that others must not have, or a part of a span.
            if idle.is_usable:
                self.slots.add(self.tiers.save(contents_of(idle)))
            self.slots.add(self._writes(idle))
            self.slots.cut(idle, n_tokens)

    def _writes(self, idle: Idle) -> list[Move]:
        """Moves that keep an idle slot in files."""
        return self.tiers.write(contents_of(idle), is_whole=idle.is_usable)

    # -- a sequence leaves its slot ----------------------------------------------------

    def swap_out(self, running: Running) -> None:
        """Save what *running* has, if that is worth it, before it loses its slot."""
        sequence, n_tokens = running.sequence, running.n_computed
        limits, n_prompt = self.slots.limits, running.request.n_prompt
        # An earlier swap is still held, or the slot is not filled yet.
        if sequence in self._swaps or running.fetch_id is not None or not n_tokens:
            return
        # A state has no tokens that a shift has moved, and no scores.
        if sequence.is_shifted or sequence.is_scoring:
            return
        # A part of it could be restored, and not where the sequence was.
        if sequence.whole(n_tokens) < n_tokens or limits.n_movable(n_tokens) < n_tokens:
            return
        if not self.tiers.is_worth_a_swap(n_tokens, n_prompt):
            return
        contents = contents_of(running)
        if limits.deterministic:
            contents = contents._replace(namespace=Private())
        self.slots.add(self.tiers.save(contents))
        self._swaps[sequence] = Swap(contents.namespace, n_tokens)

    def leave(self, running: Running, *, in_flight: bool) -> None:
        """
        Take the slot of *running*, which keeps what others may take over.

        Args:
            in_flight: a step that was planned still changes the slot: nothing is kept.
        """
        sequence = running.sequence
        keeps = self.reuses and not (in_flight or sequence.is_shifted)
        self.slots.leave(running, self.slots.limits.n_kept(sequence) if keeps else 0)
        if running.fetch_id is not None:
            self._end_fetch(running)

    def drop_swap(self, sequence: Sequence) -> None:
        """*sequence* has ended, or has what it had before: its swap is of no use."""
        if self.ahead.file is not None:
            self.ahead.drop(sequence)
        swap = self._swaps.pop(sequence, None)
        if swap is None:
            return
        if isinstance(swap.namespace, Private):
            self.cache.clear(swap.namespace)
        if swap.hit is not None:
            self.cache.unpin(swap.hit)

    # -- a slot by itself, between two steps -------------------------------------------

    def plan_copy(self, slot: int) -> tuple[Contents, StepPlan] | None:
        """
        The contents of a slot, and a plan that copies them as SLOT_SAVE.

        None if it holds nothing, or what others must not have, or rows of images and sounds.
        """
        place = self.slots.all[slot]
        if not isinstance(place, Idle) or not (place.n_held and place.is_usable):
            return None
        if place.spans:
            return None
        most_bytes = self.tiers.host.bound(place.n_held)
        save = Save(SLOT_SAVE, CacheTier.HOST, slot, 0, place.n_held, most_bytes)
        return contents_of(place), StepPlan((*self.take_moves(), save))

    def plan_fill(self, contents: Contents, payload: object) -> StepPlan | None:
        """
        A plan that brings *contents* from elsewhere into their slot.

        None if a sequence has the slot, or those that run leave too few cells.
        """
        place, n_tokens = self.slots.all[contents.slot], len(contents.tokens)
        if not isinstance(place, Idle) or n_tokens > self.slots.limits.n_ctx_slot:
            return None
        # What is here is saved as if its place was needed, and gives its cells.
        self._cut(place, 0)
        self.reclaim(n_tokens)
        if self.slots.n_free_cells < n_tokens:
            return None
        self.slots.fill(contents, payload)
        return StepPlan(self.take_moves())

    # -- before and after a step -------------------------------------------------------

    def take_moves(self) -> tuple[Move, ...]:
        """Moves of the context before it computes anything, in their order."""
        return (*self.slots.take_moves(), *self.tiers.deletions())

    def last_moves(self) -> Iterator[tuple[Move, ...]]:
        """
        Moves that write idle slots to files, when no sequence runs.

        Each is to be done and settled before the next one is asked for.
        """
        # Until ended sequences are released the context holds more than slots say.
        if self.slots.has_moves:
            yield self.take_moves()
        for idle in self.slots.idle:
            if writes := self._writes(idle):
                yield tuple(writes)

    def settle(self, result: StepResult) -> None:
        """Take in which moves of the step have worked."""
        for slot in self.tiers.settle(result):
            running = self.slots.all[slot]
            # The next best may be had, unless the sequence has left meanwhile.
            if isinstance(running, Running):
                if running.fetch_id is not None:
                    self._end_fetch(running, failed=True)
                self._emptied.append(running)
        for slot in result.not_restored:
            self.slots.lose(slot)
        if self._swaps:
            self._settle_swaps()
        if result.refuses_cuts and self.slots.limits.kind.can_cut:
            # The memory has refused to forget a part of a slot: none is asked for any
            # more. Slots are of use as a whole from now on. Snapshots and files were
            # made to be cut, so there are none.
            kind = SnapshotKind.EXACT
            self.slots.limits = replace(self.slots.limits, kind=kind, can_shift=False)
            self.tiers.close()

    def _settle_swaps(self) -> None:
        """Hold what the step has saved, let go of what it has loaded."""
        for sequence, swap in tuple(self._swaps.items()):
            running = self.slots.running.get(sequence.request.request_id)
            if running is not None and running.n_computed >= swap.n_tokens:
                self.drop_swap(sequence)
            elif swap.hit is None:
                hit = self.cache.match(swap.namespace, sequence.tokens, swap.n_tokens)
                if hit.n_tokens < swap.n_tokens:
                    del self._swaps[sequence]  # it could not be saved
                    continue
                self.cache.pin(hit)
                swap.hit = hit
                self.n_swapped += 1
                self.n_swapped_bytes += hit.n_bytes

    def forget_slots(self) -> None:
        """The context is new: slots hold nothing, and those that run are refilled."""
        moves = self.slots.take_moves()
        self.tiers.give_up(moves)
        self.slots.lose_all()
        # Files are not of the context.
        self.slots.add(move for move in moves if isinstance(move, Delete))
        self._emptied, self._followers = [], []
        for running in self.slots.running.values():
            running.leader = None
            running.points.clear()
            running.deficit = 0
            running.is_read = running.request.source is None
            self._emptied.append(running)
        self._emptied.sort(key=lambda running: running.sequence.rank)

    def clear(self, salt: str | None = None) -> int:
        """
        Forget snapshots, files and idle slots of *salt*, None: all.

        Returns the host bytes freed.
        """
        for idle in self.slots.idle:
            if idle.n_held and is_of(idle.namespace, salt):
                self.slots.cut(idle, 0)
        return self.tiers.clear(salt)

    def stats(self) -> CacheStats:
        """Counts of what was reused and what is stored."""
        return replace(self.cache.stats(), disk=self.tiers.disk.cache.stats())

    def check_integrity(self) -> None:
        """The conservation laws; raises AssertionError."""
        self.slots.check_integrity()
        self.tiers.check_integrity()
        # A sequence that waits for a file has an empty slot until that is loaded.
        for fetch_id, running in self.fetchers.items():
            assert running.fetch_id == fetch_id
            assert self.slots.is_here(running)
            assert running.n_computed == 0 or fetch_id in self.loads
        for sequence, swap in self._swaps.items():
            assert 0 < swap.n_tokens < len(sequence.tokens)
