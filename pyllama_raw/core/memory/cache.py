"""
The prefix cache: snapshots found by longest common token prefix, within strict limits.

One radix tree a namespace remembers snapshots that an executor captured. This module
decides and counts, the executor copies.

Rules:
1. A restore is match(), pin(), the copy, unpin(); drop() if the copy failed.
2. A capture is plan_store(), reserve() (which evicts first), the copy, commit() or
   abandon().
3. Every entry is in its tree, or was dropped while pinned and waits for unpin(). Its
   bytes count until its payload is released. Released payloads wait in take_released():
   the executor frees them before it captures anything new.
4. Stored, reserved and lent bytes together never pass the limit, nor do entries. What
   is pinned, reserved or lent cannot be evicted, so room is promised only from the
   others.
5. The least recently used entry is evicted first, unless others build on it.

Namespaces share limits but never hits. There is one for each salt of a caller and set
of adapters.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from pyllama_raw.core.memory.snapshots import (
    LAYOUTS,
    TOKEN_BYTES,
    CapturePlan,
    Entry,
    Hit,
    Path,
    RadixTree,
    SnapshotKind,
    charged,
)
from pyllama_raw.core.request import Namespace, Private, is_of
from pyllama_raw.core.stats import CacheStats, Eviction, Refusal


class PrefixCache:
    """
    Snapshots of all namespaces under one set of limits.

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
        self.ledger = Ledger(max_bytes, max_entries)
        self._layout = LAYOUTS[kind]
        self._trees: dict[Namespace, RadixTree[Entry]] = {}
        self._entries: set[Entry] = set()  # in a tree
        self._doomed: set[Entry] = set()  # dropped while pinned
        self._reservations: set[Reservation] = set()
        self._queue = EvictionQueue()
        self.released: list[object] = []  # until they are taken
        self._ids = count()
        self._now = 0  # queries and stores so far

    # -- restores ------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: array[int], limit: int) -> Hit:
        """
        Find what can be restored of the first *limit* of *tokens*. Changes nothing.

        The limit is len(tokens) - 1 or less: a snapshot has no logits, so at least one
        token must be computed.
        """
        assert limit >= 0
        # The tree knows more than can be restored: the layout says how much that is.
        path = self._walk(namespace, tokens[:limit].tobytes())
        spans = self._layout.spans(path)
        n_tokens = spans[-1].stop if spans else 0
        return Hit(n_tokens, spans, path.n_tokens, len(tokens))

    def record(self, hit: Hit, n_live: int = 0) -> None:
        """Count *hit* as one query, its first *n_live* tokens served from a slot."""
        self._now += 1
        totals = self.ledger.totals
        totals["n_queries"] += 1
        totals["n_query_tokens"] += hit.n_prompt
        totals["n_hit_tokens_live"] += n_live
        totals["n_hit_tokens_host"] += max(0, hit.n_tokens - n_live)
        totals["n_sparse_tokens"] += hit.n_matched - hit.n_tokens
        for span in hit.spans:
            span.entry.last_used = self._now

    def pin(self, hit: Hit) -> None:
        """Keep the entries of *hit* until unpin(); nothing may change after match()."""
        self._pin(hit.entries)

    def unpin(self, hit: Hit) -> None:
        """Undo one pin() of *hit*."""
        self._unpin(hit.entries)

    def drop(self, entry: Entry) -> None:
        """Forget *entry*, whose restore failed, and all that builds on it."""
        # It may have been cleared or dropped before, while it was pinned.
        if entry.node is not None:
            for falling in self._layout.falling(entry):
                self._forget(falling, Eviction.DROPPED)

    # -- captures ------------------------------------------------------------------

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
        ledger, refusals = self.ledger, self.ledger.refusals
        reservation = Reservation(plan, n_bytes)
        if self._missing(plan.namespace, plan.key) != plan or self._is_under_way(plan):
            refusals[Refusal.STALE] += 1
            return None
        n_charged = reservation.n_charged
        if n_charged > ledger.max_bytes or ledger.max_entries == 0:
            refusals[Refusal.TOO_BIG] += 1
            return None
        # What the snapshot builds on must not be evicted for it.
        self._pin(plan.ground)
        n_fixed = ledger.n_pinned + ledger.n_reserved
        if (
            ledger.n_fixed_bytes + n_charged > ledger.max_bytes
            or n_fixed >= ledger.max_entries
        ):
            self._unpin(plan.ground)
            refusals[Refusal.NO_ROOM] += 1
            return None
        # What the snapshot will replace goes before anything that would be missed.
        replaced = self._layout.replaced(self._walk(plan.namespace, plan.key))
        self._make_room(n_charged, first=replaced)
        ledger.n_reserved += 1
        ledger.n_reserved_bytes += n_charged
        self._reservations.add(reservation)
        return reservation

    def commit(
        self, reservation: Reservation, payload: object, n_bytes: int
    ) -> Entry | None:
        """
        Store the snapshot that was captured into *reservation*.

        None if it is of no use any more; *payload* is then released at once.
        """
        assert n_bytes <= reservation.n_bytes, "captured more than was reserved"
        plan, entry = reservation.plan, None
        self._end(reservation)
        if reservation.is_lost or any(e.node is None for e in plan.ground):
            # Cleared meanwhile, or a part that it builds on could not be restored.
            self.released.append(payload)
            self.ledger.refusals[Refusal.LOST] += 1
        elif self._missing(plan.namespace, plan.key) is None:
            # Another capture of the same was faster.
            self.released.append(payload)
            self.ledger.refusals[Refusal.COVERED] += 1
        else:
            entry = self._add(plan, payload, n_bytes)
        self._unpin(plan.ground)
        return entry

    def _add(self, plan: CapturePlan, payload: object, n_bytes: int) -> Entry:
        """Store a snapshot that there is room for."""
        self._now += 1
        replaced = self._layout.replaced(self._walk(plan.namespace, plan.key))
        entry_id = next(self._ids)
        entry = Entry(entry_id, plan.namespace, plan.start, plan.stop, n_bytes, payload)
        entry.last_used = self._now
        tree = self._trees.setdefault(plan.namespace, RadixTree())
        self._layout.attach(entry, tree.insert(plan.key))
        self._entries.add(entry)
        self._queue.push(entry)
        ledger = self.ledger
        ledger.n_entries += 1
        ledger.n_bytes += entry.n_charged
        ledger.totals["n_stores"] += 1
        ledger.totals["n_stored_tokens"] += entry.n_tokens
        # What it replaces goes, unless a slot is being filled from it.
        for loser in replaced:
            if loser.n_pins == 0:
                self._forget(loser, Eviction.REPLACED)
        return entry

    def abandon(self, reservation: Reservation) -> None:
        """Give the room of *reservation* back: nothing was captured."""
        self._end(reservation)
        self._unpin(reservation.plan.ground)
        self.ledger.refusals[Refusal.ABANDONED] += 1

    def _end(self, reservation: Reservation) -> None:
        assert reservation in self._reservations, "ended twice"
        self._reservations.remove(reservation)
        self.ledger.n_reserved -= 1
        self.ledger.n_reserved_bytes -= reservation.n_charged

    def junction(self, namespace: Namespace, tokens: array[int]) -> int | None:
        """The index where *tokens* part from stored paths; None if that is 0."""
        # At the end of a stored path a prompt goes on: it parts from nothing.
        path = self._walk(namespace, tokens.tobytes())
        if path.n_tokens < len(tokens) and not path.is_at_leaf:
            return path.n_tokens or None
        return None

    # -- other host memory, and what leaves ------------------------------------------

    def can_lend(self, n_bytes: int) -> bool:
        """Whether lend() would find room."""
        return self.ledger.n_fixed_bytes + n_bytes <= self.max_bytes

    def lend(self, n_bytes: int) -> bool:
        """
        Make room for *n_bytes* of host memory that hold no snapshot, by evicting.

        False if they cannot fit. Their user calls give_back().
        """
        if not self.can_lend(n_bytes):
            return False
        self._make_room(n_bytes, n_entries=0)
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
        # What is captured right now is of the time before: commit() refuses it.
        for reservation in self._reservations:
            if is_of(reservation.plan.namespace, salt):
                reservation.is_lost = True
        for namespace in [name for name in self._trees if is_of(name, salt)]:
            for entry in self._entries_of(namespace):
                self._forget(entry, Eviction.CLEARED)
        return n_before - self.ledger.n_bytes

    def take_released(self) -> list[object]:
        """Payloads that are of no use any more; the caller frees them."""
        released, self.released = self.released, []
        return released

    def stats(self) -> CacheStats:
        """Counts of what the cache holds and has done."""
        return self.ledger.stats()

    # -- paths, room and pins ----------------------------------------------------------

    def _walk(self, namespace: Namespace, key: bytes) -> Path[Entry]:
        """The longest prefix of *key* that a tree has."""
        tree = self._trees.get(namespace)
        return Path([], 0) if tree is None else tree.walk(key)

    def _entries_of(self, namespace: Namespace) -> list[Entry]:
        """Entries, on each path those with more tokens first."""
        nodes = list(self._trees[namespace].root.below())
        return [node.entry for node in reversed(nodes) if node.entry is not None]

    def _missing(self, namespace: Namespace, key: bytes) -> CapturePlan | None:
        return self._layout.plan(namespace, key, self._walk(namespace, key))

    def _is_under_way(self, plan: CapturePlan) -> bool:
        return any(
            other.plan.namespace == plan.namespace
            and self._layout.overlaps(plan, other.plan)
            for other in self._reservations
        )

    def _make_room(
        self, n_bytes: int, n_entries: int = 1, first: Iterable[Entry] = ()
    ) -> None:
        """Evict until so much fits, *first* before others; the caller knows it can."""
        ledger = self.ledger
        for entry in first:
            if not ledger.has_room(n_bytes, n_entries) and self._may_go(entry):
                self._forget(entry, Eviction.REPLACED)
        # Each turn takes one out, so the loop ends.
        while not ledger.has_room(n_bytes, n_entries):
            self._forget(self._queue.pop(self._may_go), Eviction.SPACE)

    def _may_go(self, entry: Entry) -> bool:
        return (
            entry.node is not None
            and entry.n_pins == 0
            and not self._layout.is_needed(entry)
        )

    def _forget(self, entry: Entry, reason: Eviction) -> None:
        """Take *entry* out of its tree; released at once unless it is pinned."""
        node, tree = entry.node, self._trees[entry.namespace]
        assert node is not None
        node.entry = entry.node = None
        last = tree.prune(node)
        # Perhaps nothing builds any more on what this one went on from: it may go, too.
        if tree.is_empty:
            del self._trees[entry.namespace]
        elif last.cover is not None:
            self._queue.push(last.cover)
        if entry.ground is not None:
            entry.ground.n_upon -= 1
            self._queue.push(entry.ground)
            entry.ground = None
        self._entries.remove(entry)
        self.ledger.evictions[reason] += 1
        if entry.n_pins:
            self._doomed.add(entry)
        else:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        self.ledger.n_entries -= 1
        self.ledger.n_bytes -= entry.n_charged
        self.released.append(entry.payload)
        entry.payload = None

    def _pin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.node is not None, "pinned too late: the entry is gone"
            if entry.n_pins == 0:
                self.ledger.n_pinned += 1
                self.ledger.n_pinned_bytes += entry.n_charged
            entry.n_pins += 1

    def _unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.n_pins > 0, "not pinned"
            entry.n_pins -= 1
            if entry.n_pins:
                continue
            self.ledger.n_pinned -= 1
            self.ledger.n_pinned_bytes -= entry.n_charged
            if entry.node is None:
                # It was dropped meanwhile: its bytes are free only now.
                self._doomed.remove(entry)
                self._release(entry)
            else:
                # The queue may have passed it over while it was pinned.
                self._queue.push(entry)

    # -- laws ------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """The conservation laws; raises AssertionError."""
        ledger, reservations = self.ledger, self._reservations
        entries = self._entries | self._doomed
        pinned = [entry for entry in entries if entry.n_pins]
        assert not self._entries & self._doomed
        assert all(entry.n_pins > 0 and entry.node is None for entry in self._doomed)
        assert all(entry.n_pins >= 0 for entry in entries)
        assert all(e.n_pins > 0 for r in reservations for e in r.plan.ground)
        assert ledger.n_entries == len(entries)
        assert ledger.n_bytes == sum(entry.n_charged for entry in entries)
        assert ledger.n_pinned == len(pinned)
        assert ledger.n_pinned_bytes == sum(entry.n_charged for entry in pinned)
        assert ledger.n_reserved == len(reservations)
        assert ledger.n_reserved_bytes == sum(r.n_charged for r in reservations)
        assert ledger.n_lent_bytes >= 0
        assert ledger.n_used_bytes <= ledger.max_bytes
        assert ledger.n_entries + ledger.n_reserved <= ledger.max_entries
        reachable = {entry for name in self._trees for entry in self._entries_of(name)}
        assert reachable == self._entries
        assert all(e.is_queued for e in self._entries if self._may_go(e))
        for namespace, tree in self._trees.items():
            assert not tree.is_empty
            tree.check_integrity()
            n_uncharged = 0
            for node in tree.root.below():
                n_uncharged += len(node.edge)
                if (entry := node.entry) is not None:
                    assert entry.node is node
                    assert entry.namespace == namespace
                    assert entry.stop == node.stop
                    n_uncharged -= TOKEN_BYTES * entry.n_tokens
                if (cover := node.cover) is not None:
                    assert cover in self._entries
                    assert cover.start <= node.start < node.stop <= cover.stop
            assert n_uncharged <= 0, "the tree holds more tokens than are counted"


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for one snapshot that is being captured: end it by commit() or abandon()."""

    plan: CapturePlan
    n_bytes: int  # most the snapshot may take
    is_lost: bool = False  # cleared meanwhile: commit() will not store it

    @property
    def n_charged(self) -> int:
        return charged(self.n_bytes, self.plan.start, self.plan.stop)


class EvictionQueue:
    """
    Entries that may be evicted, and some that may not: those are sorted out late.

    last_used of an entry only rises while the entry lives. So the queue holds each
    entry once, with a number that may be too low, and looks again when it is about to
    leave: O(log n) an entry, nothing on a hit.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._clean_at = 64

    def push(self, entry: Entry) -> None:
        """Consider *entry* from now on; needed again after pop() has passed it over."""
        if entry.is_queued:
            return
        if len(self._heap) >= self._clean_at:
            # Without dropped entries, or the heap would outgrow the cache for long.
            self._heap = [item for item in self._heap if item[2].node is not None]
            heapify(self._heap)
            self._clean_at = 2 * len(self._heap) + 64
        entry.is_queued = True
        heappush(self._heap, (entry.last_used, entry.entry_id, entry))

    def pop(self, may_go: Callable[[Entry], bool]) -> Entry:
        """Take out the least recently used entry that may go; there is one."""
        while True:
            assert self._heap, "room was promised that is not there"
            last_used, entry_id, entry = self._heap[0]
            if entry.last_used > last_used and may_go(entry):
                # It was used since: it has another place in the order.
                heapreplace(self._heap, (entry.last_used, entry_id, entry))
            else:
                heappop(self._heap)
                entry.is_queued = False
                if may_go(entry):
                    return entry


class Ledger:
    """The running sums behind `CacheStats`, and the limits."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.n_entries = self.n_bytes = 0
        self.n_reserved = self.n_reserved_bytes = 0
        self.n_pinned = self.n_pinned_bytes = 0
        self.n_lent_bytes = 0
        self.totals: Counter[str] = Counter()
        self.evictions: Counter[Eviction] = Counter()
        self.refusals: Counter[Refusal] = Counter()

    @property
    def n_used_bytes(self) -> int:
        return self.n_bytes + self.n_reserved_bytes + self.n_lent_bytes

    @property
    def n_fixed_bytes(self) -> int:
        """Bytes that no eviction can free."""
        return self.n_pinned_bytes + self.n_reserved_bytes + self.n_lent_bytes

    def has_room(self, n_bytes: int, n_entries: int = 1) -> bool:
        """Do so many more fit now?"""
        return (
            self.n_used_bytes + n_bytes <= self.max_bytes
            and self.n_entries + self.n_reserved + n_entries <= self.max_entries
        )

    def stats(self) -> CacheStats:
        counts = vars(self) | self.totals
        return CacheStats(
            n_evictions=dict(self.evictions),
            n_refusals=dict(self.refusals),
            **{name: counts.get(name, 0) for name in COUNTS},
        )


COUNTS = [field.name for field in fields(CacheStats) if field.type == "int"]
