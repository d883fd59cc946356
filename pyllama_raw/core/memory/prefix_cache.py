"""
Finds the longest prefix of a prompt that need not be computed, within strict limits.

One radix tree a namespace remembers host snapshots that an executor captured; this
module decides and counts, the executor copies.

A restore is match(), pin(), the copy, unpin(); drop() if the copy failed.
A capture is plan_store(), reserve() (which evicts first), the copy, commit() or abandon().
Payloads of entries that left wait in take_released(): the executor frees them before it
captures anything new, so the limits hold at every moment.

Namespaces, one for each salt of a caller and set of adapters, share limits but never hits.
"""

from __future__ import annotations

from array import array

from pyllama_raw.core.memory.cache_entry import CapturePlan, Entry, Hit, Reservation
from pyllama_raw.core.memory.cache_stats import CacheStats, Eviction, Ledger, Refusal
from pyllama_raw.core.memory.cache_store import EntryStore
from pyllama_raw.core.memory.snapshot_kind import LAYOUTS, SnapshotKind
from pyllama_raw.core.namespace import Namespace, Private, is_of


class PrefixCache:
    """
    Host snapshots found by longest common token prefix.

    Args:
        max_bytes: most bytes of snapshots and of their tokens; 0 stores nothing.
        max_entries: most snapshots; 0 stores nothing.
    """

    def __init__(
        self,
        kind: SnapshotKind,
        *,
        max_bytes: int,
        max_entries: int,
    ) -> None:
        self.kind = kind
        self.max_bytes = max_bytes
        self.stores = max_bytes > 0 and max_entries > 0
        self._layout = LAYOUTS[kind]
        self.ledger = Ledger(max_bytes, max_entries)
        self._store = EntryStore(self._layout, self.ledger)
        self._reservations: set[Reservation] = set()
        self._now = 0  # queries and stores so far

    def match(self, namespace: Namespace, tokens: array[int], limit: int) -> Hit:
        """
        Find what can be restored for *tokens*, at most *limit* of them. Changes nothing.

        The limit is len(tokens) - 1 or less: a snapshot has no logits, so at least one
        token must be computed.
        """
        assert limit >= 0
        path = self._store.walk(namespace, tokens[:limit].tobytes())
        spans = self._layout.spans(path)
        n_tokens = spans[-1].stop if spans else 0
        return Hit(n_tokens, spans, path.n_tokens, len(tokens))

    def record(self, hit: Hit, n_live: int = 0) -> None:
        """Count *hit* as one query, its first *n_live* tokens served from a slot."""
        self._now += 1
        self.ledger.query(hit, n_live)
        for entry in hit.entries:
            entry.last_used = self._now

    def pin(self, hit: Hit) -> None:
        """Keep the entries of *hit* until unpin(); nothing may change after match()."""
        self._store.pin(hit.entries)

    def unpin(self, hit: Hit) -> None:
        """Undo one pin() of *hit*."""
        self._store.unpin(hit.entries)

    def drop(self, entry: Entry) -> None:
        """Forget *entry*, whose restore failed, and all that builds on it."""
        if entry.node is not None:
            for falling in self._layout.falling(entry):
                self._store.forget(falling, Eviction.DROPPED)

    def plan_store(
        self, namespace: Namespace, tokens: array[int], n_tokens: int
    ) -> CapturePlan | None:
        """
        Plan a snapshot of the first *n_tokens* of *tokens*. Changes nothing.

        None if all of it is stored, or if some of it is being captured right now: the
        next snapshot point of this sequence then covers what is missing.
        """
        assert 0 < n_tokens <= len(tokens)
        plan = self._missing(namespace, tokens[:n_tokens].tobytes())
        return None if plan is None or self._is_under_way(plan) else plan

    def reserve(self, plan: CapturePlan, n_bytes: int) -> Reservation | None:
        """
        Make room for a snapshot of at most *n_bytes*, by evicting if need be.

        None if it cannot fit or *plan* is out of date; then nothing was evicted.
        """
        reservation = Reservation(plan, n_bytes)
        if self._missing(plan.namespace, plan.key) != plan or self._is_under_way(plan):
            self.ledger.refusals[Refusal.STALE] += 1
            return None
        self._store.pin(plan.ground)
        if (refusal := self.ledger.why_not(reservation.n_charged)) is not None:
            self._store.unpin(plan.ground)
            self.ledger.refusals[refusal] += 1
            return None
        replaced = self._layout.replaced(self._store.walk(plan.namespace, plan.key))
        self._store.make_room(reservation.n_charged, first=replaced)
        self.ledger.reserve(reservation)
        self._reservations.add(reservation)
        return reservation

    def commit(
        self, reservation: Reservation, payload: object, n_bytes: int
    ) -> Entry | None:
        """
        Store the snapshot that was captured into *reservation*.

        None if it is of no use any more; *payload* is then released like an evicted one.
        """
        assert n_bytes <= reservation.n_bytes, "captured more than was reserved"
        plan, entry = reservation.plan, None
        self._end(reservation)
        if (refusal := self._why_useless(reservation)) is None:
            self._now += 1
            entry = self._store.add(plan, payload, n_bytes, self._now)
        else:
            self._store.release(payload)
            self.ledger.refusals[refusal] += 1
        self._store.unpin(plan.ground)
        return entry

    def abandon(self, reservation: Reservation) -> None:
        """Give the room of *reservation* back: nothing was captured."""
        self._end(reservation)
        self._store.unpin(reservation.plan.ground)
        self.ledger.refusals[Refusal.ABANDONED] += 1

    def can_lend(self, n_bytes: int) -> bool:
        """Whether lend() would find room."""
        return self.ledger.n_fixed_bytes + n_bytes <= self.max_bytes

    def lend(self, n_bytes: int) -> bool:
        """
        Make room for *n_bytes* of host memory that hold no snapshot, by evicting if need be.

        False if they cannot fit. Their user calls give_back().
        """
        if not self.can_lend(n_bytes):
            return False
        self._store.make_room(n_bytes, n_entries=0)
        self.ledger.n_lent_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        """The memory is free again."""
        self.ledger.n_lent_bytes -= n_bytes

    def clear(self, salt: str | Private | None = None) -> int:
        """
        Forget the entries of *salt*, or of all; returns the bytes freed at once.

        Pinned entries can no longer be found and are freed when they are unpinned. What
        is being captured will not be stored.
        """
        n_before = self.ledger.n_bytes
        for reservation in self._reservations:
            if is_of(reservation.plan.namespace, salt):
                reservation.is_lost = True
        for name in self._store.namespaces(salt):
            for entry in self._store.entries_of(name):
                self._store.forget(entry, Eviction.CLEARED)
        return n_before - self.ledger.n_bytes

    def take_released(self) -> list[object]:
        """Payloads nobody needs any more, since the last call; the caller frees them."""
        return self._store.take_released()

    def junction(self, namespace: Namespace, tokens: array[int]) -> int | None:
        """The index where *tokens* part from stored paths, unless that is at their beginning."""
        path = self._store.walk(namespace, tokens.tobytes())
        if path.n_tokens < len(tokens) and not path.is_at_leaf:
            return path.n_tokens or None
        return None

    def stats(self) -> CacheStats:
        """Counts of what the cache holds and has done."""
        return self.ledger.stats()

    def check_integrity(self) -> None:
        """Conservation laws as assertions: limits, sums, pins, every entry reachable."""
        ledger, reservations = self.ledger, self._reservations
        self._store.check_integrity()
        assert ledger.n_reserved == len(reservations)
        assert ledger.n_reserved_bytes == sum(r.n_charged for r in reservations)
        assert ledger.n_lent_bytes >= 0
        assert ledger.n_used_bytes <= ledger.max_bytes
        assert ledger.n_entries + ledger.n_reserved <= ledger.max_entries
        assert all(e.n_pins > 0 for r in reservations for e in r.plan.ground)

    def _missing(self, namespace: Namespace, key: bytes) -> CapturePlan | None:
        return self._layout.plan(namespace, key, self._store.walk(namespace, key))

    def _is_under_way(self, plan: CapturePlan) -> bool:
        return any(
            other.plan.namespace == plan.namespace
            and self._layout.overlaps(plan, other.plan)
            for other in self._reservations
        )

    def _why_useless(self, reservation: Reservation) -> Refusal | None:
        plan = reservation.plan
        if reservation.is_lost or any(entry.node is None for entry in plan.ground):
            return Refusal.LOST
        if self._missing(plan.namespace, plan.key) is None:
            return Refusal.COVERED
        return None

    def _end(self, reservation: Reservation) -> None:
        assert reservation in self._reservations, "ended twice"
        self._reservations.remove(reservation)
        self.ledger.unreserve(reservation)
