"""
Values of the prefix cache: entries, hits, plans, reservations.

An entry changes in the hands of its `PrefixCache` only; others read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pyllama_raw.core.memory.radix_tree import TOKEN_BYTES, Node
from pyllama_raw.core.namespace import Namespace


@dataclass(eq=False, slots=True)
class Entry:
    """One snapshot of the positions [start, stop) of a token path."""

    entry_id: int  # rises with the order of storing
    namespace: Namespace
    start: int  # 0 unless the snapshot is a range
    stop: int
    n_bytes: int  # of the snapshot
    payload: object = field(repr=False)  # the executor's; None once released
    node: Node[Entry] | None = field(default=None, repr=False)  # None: dropped
    n_pins: int = 0
    last_used: int = 0  # count of queries and stores so far, not a time
    is_queued: bool = False  # the eviction queue knows it
    ground: Entry | None = field(
        default=None, repr=False
    )  # in a chain: what it goes on from
    n_upon: int = 0  # entries in the tree that go on from this one

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start

    @property
    def n_charged(self) -> int:
        """Bytes counted against the limit: the snapshot and its tokens in the tree."""
        return charged(self.n_bytes, self.start, self.stop)


def charged(n_bytes: int, start: int, stop: int) -> int:
    """
    Bytes that a snapshot of [start, stop) costs.

    Tokens that several entries share in the tree are charged to each of them, so the sum
    is never less than what is held.
    """
    return n_bytes + TOKEN_BYTES * (stop - start)


class Stretch(NamedTuple):
    """The part [start, stop) of an entry that a restore uses; the rest is trimmed."""

    entry: Entry
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Hit:
    """Snapshots that can be restored for a prompt; valid until the cache changes, or while pinned."""

    n_tokens: int  # in the slot after restoring all spans and trimming to here
    spans: tuple[Stretch, ...]  # to restore in this order; they join without gap from 0
    n_matched: int  # tokens the tree knows, usable or not
    n_prompt: int

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(span.entry for span in self.spans)

    @property
    def n_bytes(self) -> int:
        """Bytes of all snapshots, because each is restored whole."""
        return sum(span.entry.n_bytes for span in self.spans)


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """A snapshot to be made: positions [start, stop) of the path *key*."""

    namespace: Namespace
    key: bytes = field(repr=False)  # all tokens before stop
    start: int
    stop: int
    ground: tuple[Entry, ...] = ()  # must stay for the new entry to be of use


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for one snapshot that is being captured: end it by commit() or abandon()."""

    plan: CapturePlan
    n_bytes: int  # most the snapshot may take
    is_lost: bool = False  # cleared meanwhile: commit() will not store it

    @property
    def n_charged(self) -> int:
        return charged(self.n_bytes, self.plan.start, self.plan.stop)
