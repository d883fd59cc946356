"""
Where a sequence that gets a slot takes its first tokens from.

In this order of preference: the memory of a slot, running or idle; a host snapshot if
that reaches further; else they are computed. A sequence whose prefix another one is
computing right now waits for it and takes it over, so n equal prompts cost one prefill.
What an idle slot holds is captured before somebody else needs the place or the cells.

Operations go into one list in the order they are decided, because they depend on each
other: a slot may be copied first and emptied later in the same step.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass

from pyllama_raw.core.cache_entry import Hit, Reservation
from pyllama_raw.core.prefix_cache import PrefixCache
from pyllama_raw.core.radix_tree import n_common
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.slots import Slot, Slots
from pyllama_raw.core.snapshot_points import snapshot_points
from pyllama_raw.core.step import (
    Capture,
    Copy,
    Operation,
    Piece,
    Release,
    Restore,
    StepResult,
    Trim,
)

MIN_WAIT = 16  # tokens that waiting for a leader must save
TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """Bytes of a snapshot, as measured when the context was made."""

    base_bytes: int = 0
    token_bytes: int = 0

    def bound(self, n_tokens: int) -> int:
        """No snapshot of *n_tokens* is larger."""
        return self.base_bytes + self.token_bytes * n_tokens


@dataclass(frozen=True, slots=True)
class Source:
    """A slot that holds a prefix, or will when its sequence has computed it."""

    slot: Slot
    n_now: int
    n_later: int


class PrefixReuse:
    """Fills new sequences from what is known; keeps what may be of use."""

    def __init__(
        self,
        slots: Slots,
        cache: PrefixCache,
        operations: list[Operation],
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
        self._slots = slots
        self._operations = operations
        self._cost = cost
        self._interval = interval
        self._stores = cache.max_bytes > 0
        self._n_captures = 0
        self._captures: dict[int, Reservation] = {}
        self._restores: dict[int, Hit] = {}  # by slot

    # -- a sequence gets its tokens ----------------------------------------------

    def place(self, sequence: Sequence) -> None:
        """Give *sequence* the idle slot that suits it best, and its prefix."""
        source = self._source(sequence) if self.keeps else None
        if source is not None and self._takes_over(source):
            slot = source.slot
            if source.n_now < slot.n_left:
                self._save(slot)
                self._slots.trim(slot, source.n_now)
                self._operations.append(Trim(slot.index, source.n_now))
            self._slots.place(sequence, slot)
            self._note_cached(sequence, CacheTier.LIVE)
            self.cache.record(self._match(sequence), source.n_now)
            self._plan_points(sequence)
            return
        free = [s for s in self._slots.idle if source is None or s is not source.slot]
        self._evict(free[0])
        self._slots.place(sequence, free[0])
        if self.keeps:
            self._fill(sequence)

    def advance(self) -> None:
        """Let sequences that wait for a leader take over what it has computed."""
        for sequence in self._slots.running:
            leader = sequence.leader
            if leader is None:
                continue
            missed = not self._can_cut and leader.n_computed > sequence.fork_at
            if missed or leader.slot is None or leader.is_shifted:
                sequence.leader = None
                self._fill(sequence)
            elif leader.n_computed >= sequence.fork_at:
                sequence.leader = None
                self._copy(
                    self._slots.all[leader.slot or 0], sequence, sequence.fork_at
                )
                self._plan_points(sequence)

    @property
    def _can_cut(self) -> bool:
        return self._slots.limits.can_cut

    def _takes_over(self, source: Source) -> bool:
        """Whether to go on in the slot of *source* instead of copying out of it."""
        if source.slot.sequence is not None or source.n_now == 0:
            return False
        idle = self._slots.idle
        return source.n_now == source.slot.n_left or (len(idle) == 1 and self._can_cut)

    def _fill(self, sequence: Sequence) -> None:
        """Take the prefix of *sequence*, whose slot is empty, from the best source."""
        source = self._source(sequence)
        hit = self._match(sequence)
        n_live = source.n_now if source else 0
        best = max(n_live, hit.n_tokens)
        if source is not None and source.n_later >= best + self.min_wait:
            self._follow(sequence, source)
            return
        self.cache.record(hit, n_live)
        if source is not None and n_live >= max(hit.n_tokens, 1):
            self._copy(source.slot, sequence, n_live)
        elif hit.n_tokens:
            self._restore(sequence, hit)
        self._plan_points(sequence)

    def _source(self, sequence: Sequence) -> Source | None:
        """The slot with the longest prefix of *sequence*, now or later."""
        key = sequence.tokens[:-1].tobytes()
        best: Source | None = None
        for slot in self._slots.all:
            found = self._shared(slot, sequence, key)
            if found is not None and (
                best is None
                or (found.n_later, found.n_now) > (best.n_later, best.n_now)
            ):
                best = found
        return best

    def _shared(self, slot: Slot, sequence: Sequence, key: bytes) -> Source | None:
        other = slot.sequence
        if other is sequence:
            return None
        if other is None:
            namespace, tokens, n_held = slot.namespace, slot.left, slot.n_left
        else:
            namespace, tokens = other.request.namespace, other.tokens.tobytes()
            n_held = other.n_computed
        if namespace != sequence.request.namespace or (other and other.is_shifted):
            return None
        n_same = n_common(tokens, key)
        n_now = min(n_same, n_held)
        if not self._can_cut and n_now < n_held:
            n_now = 0  # such memory is of use as a whole only
        computing = other is not None and other.n_behind > 1 and n_same > n_held
        if computing and _waits_for(other, sequence):
            computing = False
        n_later = n_same if computing else n_now
        return Source(slot, n_now, n_later) if n_later else None

    def _follow(self, sequence: Sequence, source: Source) -> None:
        leader = source.slot.sequence
        assert leader is not None
        sequence.leader, sequence.fork_at = leader, source.n_later
        if not self._can_cut and source.n_later not in leader.points:
            insort(leader.points, source.n_later)

    def _copy(self, src: Slot, sequence: Sequence, n_tokens: int) -> None:
        self._slots.share(src, sequence, n_tokens)
        self._operations.append(Copy(src.index, sequence.slot or 0, n_tokens))
        self._note_cached(sequence, CacheTier.LIVE)

    def _match(self, sequence: Sequence) -> Hit:
        request = sequence.request
        limit = len(sequence.tokens) - 1
        return self.cache.match(request.namespace, sequence.tokens, limit)

    def _note_cached(self, sequence: Sequence, tier: CacheTier) -> None:
        if sequence.n_computed and not (sequence.n_output or sequence.n_preempted):
            sequence.n_cached, sequence.cache_tier = sequence.n_computed, tier

    # -- host snapshots ------------------------------------------------------------

    def _restore(self, sequence: Sequence, hit: Hit) -> None:
        slot = sequence.slot or 0
        # A piece is restored whole before its unused end is cut off.
        self.cache.pin(hit)
        self.reclaim(max(entry.stop for entry in hit.entries))
        if self._slots.n_free_cells < max(entry.stop for entry in hit.entries):
            self.cache.unpin(hit)
            return
        self._slots.rewind(sequence, hit.n_tokens)
        pieces = tuple(Piece(s.entry.payload, s.start, s.stop) for s in hit.spans)
        self._operations.append(Restore(slot, pieces))
        self._restores[slot] = hit
        self._note_cached(sequence, CacheTier.HOST)

    def _save(self, slot: Slot) -> None:
        """Capture what an idle slot holds and no snapshot has."""
        if slot.n_left:
            self._capture(slot, array("i", slot.left))

    def _capture(self, slot: Slot, tokens: array[int]) -> None:
        namespace = slot.namespace
        if slot.sequence is not None:
            namespace = slot.sequence.request.namespace
        plan = self.cache.plan_store(namespace, tokens, len(tokens))
        if plan is None:
            return
        max_bytes = self._cost.bound(plan.stop - plan.start)
        reservation = self.cache.reserve(plan, max_bytes)
        if reservation is None:
            return
        self._n_captures += 1
        self._captures[self._n_captures] = reservation
        self._operations.append(
            Capture(self._n_captures, slot.index, plan.start, plan.stop, max_bytes)
        )

    def _plan_points(self, sequence: Sequence) -> None:
        """Memory that cannot be cut is captured at points, where chunks end."""
        if self._can_cut or not self._stores:
            return
        request = sequence.request
        points = snapshot_points(
            request.n_prompt,
            interval=self._interval,
            junctions=self.cache.junctions(request.namespace, request.tokens),
            cache_points=request.cache_points,
        )
        ahead = [point for point in points if point > sequence.n_computed]
        sequence.points = sorted({*ahead, *sequence.points})

    def reach(self, sequence: Sequence) -> None:
        """Capture *sequence* if it stands at one of its points. Call before it goes on."""
        points = sequence.points
        if not points or sequence.n_computed < points[0]:
            return
        if points.pop(0) == sequence.n_computed and self._stores:
            slot = self._slots.all[sequence.slot or 0]
            self._capture(slot, sequence.tokens[: sequence.n_computed])

    def reclaim(self, n_cells: int) -> None:
        """Empty idle slots, the longest unused first, until *n_cells* are free."""
        for slot in self._slots.idle:
            if self._slots.n_free_cells >= n_cells:
                return
            self._evict(slot)

    def _evict(self, slot: Slot) -> None:
        if slot.n_left:
            self._save(slot)
            self._slots.empty(slot)
            self._operations.append(Release(slot.index))

    # -- results -------------------------------------------------------------------

    def settle(self, result: StepResult) -> None:
        """Take in which captures and restores of the step have worked."""
        for capture_id, reservation in self._captures.items():
            captured = result.captured.get(capture_id)
            if captured is None:
                self.cache.abandon(reservation)
            else:
                self.cache.commit(reservation, captured.payload, captured.n_bytes)
        self._captures.clear()
        for slot, hit in self._restores.items():
            self.cache.unpin(hit)
            if slot in result.not_restored:
                self.cache.drop(hit.entries[0])
        self._restores.clear()
        for index in result.not_restored:
            self._lose(self._slots.all[index])

    def _lose(self, slot: Slot) -> None:
        """The slot turned out to be empty."""
        sequence = slot.sequence
        if sequence is None:
            self._slots.empty(slot)
        else:
            self._slots.rewind(sequence, 0)
            sequence.n_cached, sequence.cache_tier = 0, None

    def forget_idle(self, namespace: Hashable | None) -> None:
        """Empty the idle slots of *namespace*, None: all; nothing is captured."""
        for slot in self._slots.idle:
            if slot.n_left and namespace in (None, slot.namespace):
                self._slots.empty(slot)
                self._operations.append(Release(slot.index))

    def forget_slots(self) -> None:
        """The context is new: no slot holds anything."""
        for slot in self._slots.all:
            if slot.sequence is None:
                self._slots.empty(slot)
            else:
                self._slots.rewind(slot.sequence, 0)


def _waits_for(sequence: Sequence | None, other: Sequence) -> bool:
    """Whether *sequence* goes on only when *other* has."""
    while sequence is not None:
        if sequence is other:
            return True
        sequence = sequence.leader
    return False
