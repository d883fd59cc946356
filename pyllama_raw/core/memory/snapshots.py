"""
Host snapshots of slots: what to capture and restore in the next step.

A capture holds its room in the cache, and a restore pins its entries, until settle() has
seen what came of the step. A failure of either is a miss, never an error.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pyllama_raw.core.exact import N_FRESH
from pyllama_raw.core.limits import ContextLimits
from pyllama_raw.core.memory.cache_entry import Hit, Reservation
from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.memory.slots import Slot
from pyllama_raw.core.memory.snapshot_points import snapshot_points, spaced
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.step import Capture, Operation, Piece, Restore, StepResult


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """Bytes of a snapshot, as measured when the context was made."""

    base_bytes: int = 0
    token_bytes: int = 0

    def bound(self, n_tokens: int) -> int:
        """No snapshot of *n_tokens* is larger."""
        return self.base_bytes + self.token_bytes * n_tokens


class Snapshots:
    """
    Captures and restores of one step.

    Args:
        interval: tokens between regular points of memory that cannot be cut.
    """

    tier = CacheTier.HOST
    min_gain = 1

    def __init__(
        self,
        cache: PrefixCache,
        operations: list[Operation],
        *,
        cost: SnapshotCost,
        interval: int,
        limits: ContextLimits,
    ) -> None:
        self.cache = cache
        self._operations = operations
        self._cost = cost
        self._interval = interval
        self._limits = limits
        self._has_points = cache.stores and not limits.can_cut
        self._n_captures = 0
        self._captures: dict[int, Reservation] = {}
        self._restores: dict[int, Hit] = {}  # by slot

    def match(self, sequence: Sequence, n_fresh: int) -> Hit:
        """What can be restored of *sequence*; its last *n_fresh* tokens are computed."""
        limit = max(sequence.n_in_chunks - n_fresh, 0)
        return self.cache.match(sequence.request.namespace, sequence.tokens, limit)

    def restore(self, slot: int, hit: Hit) -> Operation:
        """What fills *slot*, which is empty, from *hit*, which is pinned."""
        pieces = tuple(Piece(s.entry.payload, s.start, s.stop) for s in hit.spans)
        self._restores[slot] = hit
        return Restore(slot, pieces)

    def save(self, slot: Slot) -> None:
        """Capture what an idle slot holds and no snapshot has."""
        self._capture(slot, array("i", slot.left))

    def plan_points(self, sequence: Sequence) -> None:
        """Memory that cannot be cut is captured at points, where chunks end."""
        if not self._has_points:
            return
        request, limits = sequence.request, self._limits
        points = snapshot_points(
            request.n_prompt,
            interval=self._interval,
            n_tail=N_FRESH,
            junction=self.cache.junction(request.namespace, request.tokens),
            cache_points=request.cache_points,
        )
        movable = {limits.n_movable(point) for point in points}
        sequence.points = spaced(
            {*movable, *sequence.points}, sequence.n_computed, N_FRESH
        )

    def reach(self, slot: Slot) -> None:
        """Capture a running slot that stands at one of its points, before it goes on."""
        sequence = slot.sequence
        assert sequence is not None
        points, n_computed = sequence.points, sequence.n_computed
        while points and points[0] < n_computed:  # what was restored reached further
            points.pop(0)
        if points and points[0] == n_computed:
            points.pop(0)
            if self._has_points:
                self._capture(slot, sequence.tokens[:n_computed])

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
