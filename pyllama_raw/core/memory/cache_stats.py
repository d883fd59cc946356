"""
Counts of the prefix cache: what it holds and has done.

Rule: stored, reserved and lent bytes together never pass the limit, nor do entries. What
is pinned, reserved or lent cannot be evicted, so room is promised only from the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama_raw.core.memory.cache_entry import Entry, Hit, Reservation


class Eviction(StrEnum):
    """Why an entry left."""

    SPACE = "space"  # another one needed the bytes or the place
    REPLACED = "replaced"  # a longer state of its lineage was stored
    DROPPED = "dropped"  # its restore failed, or that of one it builds on
    CLEARED = "cleared"


class Refusal(StrEnum):
    """Why a snapshot was not stored."""

    TOO_BIG = "too big"  # more than the limits allow in an empty cache
    NO_ROOM = "no room"  # the rest is pinned or reserved
    STALE = "stale"  # the cache changed between plan_store() and reserve()
    LOST = "lost"  # cleared, or its ground dropped, while it was captured
    COVERED = "covered"  # another one stored the same meanwhile
    ABANDONED = "abandoned"  # the capture failed


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start, in tokens where the name says so, and what is held now."""

    n_queries: int
    """Prompts that the cache was asked for."""
    n_query_tokens: int
    """Tokens of these prompts."""
    n_hit_tokens_live: int
    """Tokens found in the memory of a slot."""
    n_hit_tokens_host: int
    """Tokens found in a snapshot; among files, those that were read."""
    n_sparse_tokens: int
    """Tokens that are known, but that no entry can restore."""
    n_stores: int
    """Snapshots that were stored."""
    n_stored_tokens: int
    """Tokens of these snapshots."""
    n_evictions: Mapping[Eviction, int]
    """Snapshots that left, by reason."""
    n_refusals: Mapping[Refusal, int]
    """Snapshots that were not stored, by reason."""
    n_entries: int
    """Snapshots held now."""
    n_pinned: int
    """Snapshots that are being restored."""
    n_reserved: int
    """Snapshots that are being captured."""
    n_bytes: int
    """Bytes of all snapshots, their tokens included."""
    n_reserved_bytes: int
    """Bytes promised to snapshots that are being captured."""
    n_lent_bytes: int
    """Bytes of states on their way to files."""
    max_entries: int
    """The limit of snapshots."""
    max_bytes: int
    """The limit of bytes."""
    disk: CacheStats | None = None
    """The same of files; None without a directory."""


COUNTS = [field.name for field in fields(CacheStats) if field.type == "int"]


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

    def why_not(self, n_bytes: int) -> Refusal | None:
        """Why one more entry of *n_bytes* cannot fit, whatever is evicted; None: it can."""
        if n_bytes > self.max_bytes or self.max_entries == 0:
            return Refusal.TOO_BIG
        n_fixed = self.n_pinned + self.n_reserved
        if self.n_fixed_bytes + n_bytes > self.max_bytes or n_fixed >= self.max_entries:
            return Refusal.NO_ROOM
        return None

    def query(self, hit: Hit, n_live: int) -> None:
        self.totals["n_queries"] += 1
        self.totals["n_query_tokens"] += hit.n_prompt
        self.totals["n_hit_tokens_live"] += n_live
        self.totals["n_hit_tokens_host"] += max(0, hit.n_tokens - n_live)
        self.totals["n_sparse_tokens"] += hit.n_matched - hit.n_tokens

    def reserve(self, reservation: Reservation) -> None:
        self.n_reserved += 1
        self.n_reserved_bytes += reservation.n_charged

    def unreserve(self, reservation: Reservation) -> None:
        self.n_reserved -= 1
        self.n_reserved_bytes -= reservation.n_charged

    def store(self, entry: Entry) -> None:
        self.n_entries += 1
        self.n_bytes += entry.n_charged
        self.totals["n_stores"] += 1
        self.totals["n_stored_tokens"] += entry.n_tokens

    def release(self, entry: Entry) -> None:
        self.n_entries -= 1
        self.n_bytes -= entry.n_charged

    def pin(self, entry: Entry) -> None:
        self.n_pinned += 1
        self.n_pinned_bytes += entry.n_charged

    def unpin(self, entry: Entry) -> None:
        self.n_pinned -= 1
        self.n_pinned_bytes -= entry.n_charged

    def stats(self) -> CacheStats:
        known = vars(self) | self.totals
        return CacheStats(
            n_evictions=dict(self.evictions),
            n_refusals=dict(self.refusals),
            **{name: known.get(name, 0) for name in COUNTS},
        )
