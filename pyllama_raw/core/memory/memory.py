"""
Memory: what sequences have of it, and what is kept for others.

`Slots` says what each sequence has, `Starts` what a sequence begins with, `Restores` fills it from
snapshots and files, and `Keeping` saves what a slot held before somebody else gets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyllama_raw.core.memory.cache_stats import CacheStats
from pyllama_raw.core.memory.keeping import Keeping
from pyllama_raw.core.memory.limits import ContextLimits
from pyllama_raw.core.memory.placement import TakeOver
from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.memory.restores import Restores
from pyllama_raw.core.memory.slots import Idle, Slots
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.memory.snapshot_points import Points
from pyllama_raw.core.memory.starts import Starts
from pyllama_raw.core.memory.swaps import Swaps
from pyllama_raw.core.memory.tier import SnapshotCost, Tier
from pyllama_raw.core.memory.tiers import Tiers
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Running, Sequence
from pyllama_raw.core.speed import Captures, PrefillSpeed
from pyllama_raw.core.step import Delete, Move, StepResult


class Memory:
    """
    The one owner of slots, snapshots and files.

    Rules:
    1. `slots` alone writes what a slot holds, and the moves that it takes.
    2. take_moves() hands these out once, in order; the plan with them is the next one that
       is executed, and settle() comes before any other change.
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
        target_step_s: float,
    ) -> None:
        """
        Args:
            cache: None: slots forget what they held as soon as a sequence leaves.
            disk: None: nothing is kept in files.
            interval: tokens between regular snapshots of memory that cannot be cut.
        """
        self._keeps = cache is not None
        self.cell_bytes = cost.token_bytes  # as measured of states; 0: not by the token
        self.cache = cache or PrefixCache(limits.kind, max_bytes=0, max_entries=0)
        self.slots = slots = Slots(limits)
        host = Tier(CacheTier.HOST, self.cache, cost.bound)
        disk = disk or Tier.without_files()
        self.ledgers = self.cache.ledger, disk.cache.ledger  # what host and files hold
        self.captures = Captures(cost.price, prefill, target_step_s, cost.token_bytes)
        self.tiers = tiers = Tiers(host, disk, prefill, self.captures, cost.price)
        self._points = points = Points(self.cache, limits, interval)
        self._keeping = Keeping(slots, tiers)
        self.restores = Restores(slots, tiers, self._keeping, points)
        self.swaps = swaps = Swaps(slots, tiers)
        self.starts = Starts(
            slots, tiers, points, self.restores, swaps, keeps=self._keeps
        )

    # -- sequences come and leave -----------------------------------------------------

    def seat(self, sequence: Sequence) -> None:
        """Give *sequence* an idle slot, and the prefix that there is of it."""
        slot, placement = self.starts.place(sequence)
        idle = self.slots.all[slot]
        assert isinstance(idle, Idle)
        n_kept = placement.n_tokens if isinstance(placement, TakeOver) else 0
        self._keeping.cut(idle, n_kept)
        self.starts.start(self.slots.seat(sequence, slot), placement)

    def leave(self, running: Running, *, in_flight: bool) -> None:
        """
        Take the slot of *running*, which keeps what others may take over.

        Args:
            in_flight: a step that was planned still changes the slot: nothing is kept.
        """
        sequence = running.sequence
        keeps = self._keeps and not (in_flight or sequence.is_shifted)
        self.slots.leave(running, self.slots.limits.n_kept(sequence) if keeps else 0)
        if running.fetch_id is not None:
            self.restores.end(running)

    def catch_up(self) -> None:
        """
        Fill sequences that have lost their tokens; followers take over what their leader has.

        Called once a step, before anything is planned of it.
        """
        self.restores.go_on()
        for running in self.restores.take_emptied():
            self.starts.fill(running)
        for running in self.slots.running.values():
            if running.leader is not None:
                self.starts.catch_up(running, running.leader)

    # -- before and after a step -------------------------------------------------------

    def take_moves(self) -> tuple[Move, ...]:
        """Moves of the context before it computes anything, in their order."""
        return (*self.slots.take_moves(), *self.tiers.deletions())

    def last_moves(self) -> Iterator[tuple[Move, ...]]:
        """
        Moves that write idle slots to files, when no sequence runs.

        Each is to be done and settled before the next one is asked for. The first does what
        ended sequences have left to do: until then the context holds more than slots say.
        """
        if self.slots.has_moves:
            yield self.take_moves()
        yield from self._keeping.last_moves()

    def reach(self, running: Running) -> None:
        """Capture *running* if it stands at one of its points. Call before it goes on."""
        if self._points.reach(running):
            self._keeping.capture(running)

    def reclaim(self, n_cells: int) -> None:
        """Empty idle slots, the longest unused first, until *n_cells* are free."""
        if self.slots.n_free_cells < n_cells:
            self._keeping.reclaim(n_cells)

    def settle(self, result: StepResult) -> None:
        """Take in which moves of the step have worked."""
        self.restores.settle(self.tiers.settle(result))
        for slot in result.not_restored:
            self.slots.lose(slot)
        self.swaps.settle()
        if result.refuses_cuts:
            self._forbid_cuts()

    def _forbid_cuts(self) -> None:
        """
        The memory has refused to forget a part of a slot: none is asked for any more.

        Slots are of use as a whole from now on. Snapshots and files were made to be cut, so
        there are none.
        """
        limits = self.slots.limits
        if limits.can_cut:
            kind = SnapshotKind.EXACT
            self.slots.limits = replace(limits, kind=kind, can_shift=False)
            self.tiers.close()

    def forget_slots(self) -> None:
        """The context is new: no slot holds anything, and what runs is to be filled again."""
        moves = self.slots.take_moves()
        self.tiers.give_up(moves)
        self.slots.lose_all()
        self.slots.add(move for move in moves if isinstance(move, Delete))
        running = self.slots.running.values()
        for each in running:
            each.leader = None
            each.points.clear()
            each.deficit = 0
            each.is_read = each.request.source is None
        self.restores.emptied = sorted(running, key=lambda each: each.sequence.rank)

    def clear(self, salt: str | None = None) -> int:
        """
        Forget snapshots, files and idle slots of *salt*, None: all.

        Returns the host bytes freed.
        """
        self._keeping.clear(salt)
        return self.tiers.clear(salt)

    def stats(self) -> CacheStats:
        """Counts of what was reused and what is stored."""
        return replace(self.cache.stats(), disk=self.tiers.disk.cache.stats())

    def check_integrity(self) -> None:
        """The conservation laws; raises AssertionError."""
        self.slots.check_integrity()
        self.tiers.check_integrity()
        self.restores.check_integrity()
        self.swaps.check_integrity()
