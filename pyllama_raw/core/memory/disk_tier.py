"""
Which states of slots are kept in files, and which one a prompt starts from.

A file holds the whole state of one token path and stands alone. What an idle slot holds
is written when somebody else needs the place, and when the engine closes; of memory that
is of use as a whole only, so are the host snapshots on the slot's path.

Rules:
1. A file can be found only when its writer has reported it complete.
2. The bytes of a file that is being written count; what it displaces is deleted first.
   So do, against the limit of host memory, those of its state until it is written.
3. A file is read only if it saves many tokens more than memory does. A read that fails
   is a miss, and the file goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Self

from pyllama_raw.core.memory.cache_entry import CapturePlan, Hit, Reservation
from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.memory.slots import Slot
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.namespace import Namespace, Private
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.step import (
    Captured,
    Delete,
    Export,
    Operation,
    Read,
    StepResult,
    Write,
)

MIN_GAIN = 64  # tokens a file must have beyond what memory has


class KnownState(NamedTuple):
    """A file that is there at the start."""

    namespace: Namespace
    tokens: array[int]
    payload: object
    n_bytes: int  # without those of the tokens, which the cache counts itself


class Writing(NamedTuple):
    """A file on its way."""

    reservation: Reservation
    free: Callable[[], None]  # the host memory of its state


class DiskTier:
    """An index of files, and the operations that write, read and delete them."""

    tier = CacheTier.DISK

    def __init__(
        self,
        cache: PrefixCache,
        bound: Callable[[int], int],
        known: Iterable[KnownState] = (),
    ) -> None:
        """
        Args:
            cache: the index, of states that stand alone; max_bytes 0 keeps nothing.
            bound: no file of so many tokens is larger; its tokens are not counted.
            known: from the one used longest ago to the latest.
        """
        assert cache.kind is not SnapshotKind.RANGE
        self.min_gain = MIN_GAIN
        self.cache = cache
        self._bound = bound
        self._n_writes = 0
        self._writes: dict[int, Writing] = {}
        self._reads: dict[int, Hit] = {}  # by slot
        self._superfluous: list[object] = []  # files found that are not in the index
        for state in known:
            self._adopt(state)

    @classmethod
    def off(cls) -> Self:
        """One that keeps nothing."""
        none = PrefixCache(SnapshotKind.STATE, max_bytes=0, max_entries=0)
        return cls(none, lambda _: 0)

    def match(self, sequence: Sequence, n_fresh: int) -> Hit:
        """What can be read of *sequence*; its last *n_fresh* tokens are computed."""
        limit = max(sequence.n_in_chunks - n_fresh, 0)
        return self.cache.match(sequence.request.namespace, sequence.tokens, limit)

    def restore(self, slot: int, hit: Hit) -> Operation:
        """What fills *slot*, which is empty, from *hit*, which is pinned."""
        self._reads[slot] = hit
        return Read(slot, hit.entries[0].payload, hit.n_tokens)

    def save(self, slot: Slot, host: PrefixCache) -> list[Operation]:
        """What writes all that an idle slot holds, if no file has it and *host* has room."""
        namespace, tokens = slot.namespace, array("i", slot.left)
        n_bytes = self._bound(len(tokens))
        plan = self._plan(namespace, tokens)
        if plan is None or not host.lend(n_bytes):
            return []
        write_id = self._begin(plan, n_bytes, partial(host.give_back, n_bytes))
        if write_id is None:
            return []
        assert not isinstance(namespace, Private)  # see _plan()
        write = Write(write_id, slot.index, namespace, slot.left, n_bytes)
        return [*self.deletions(), write]

    def export(self, slot: Slot, host: PrefixCache) -> list[Operation]:
        """What writes the snapshots of *host* on the path of an idle slot."""
        if self.cache.kind is not SnapshotKind.EXACT or not self.cache.max_bytes:
            return []
        namespace, path = slot.namespace, array("i", slot.left)
        operations: list[Operation] = []
        limit = len(path) - 1
        while limit > 0 and (hit := host.match(namespace, path, limit)).entries:
            (entry,), limit = hit.entries, hit.n_tokens - 1
            tokens = path[: hit.n_tokens]
            plan = self._plan(namespace, tokens)
            if plan is None:
                continue
            host.pin(hit)
            n_bytes = self._bound(len(tokens))
            write_id = self._begin(plan, n_bytes, partial(host.unpin, hit))
            if write_id is not None:
                assert not isinstance(namespace, Private)  # see _plan()
                export = Export(write_id, namespace, tokens.tobytes(), entry.payload)
                operations += [*self.deletions(), export]
        return operations

    def end_write(self, write_id: int, written: Captured | None) -> None:
        """The file is complete; None: there is none."""
        reservation, free = self._writes.pop(write_id)
        free()
        if written is None:
            self.cache.abandon(reservation)
        else:
            self.cache.commit(reservation, written.payload, written.n_bytes)

    def settle(self, result: StepResult) -> None:
        """Take in which reads of the step have worked."""
        for slot, hit in self._reads.items():
            self.cache.unpin(hit)
            if slot in result.not_restored:
                self.cache.drop(hit.entries[0])
        self._reads.clear()

    def deletions(self) -> list[Operation]:
        """What deletes the files that left the index since the last call."""
        released = self._superfluous + self.cache.take_released()
        self._superfluous = []
        return [Delete(tuple(released))] if released else []

    def _plan(self, namespace: Namespace, tokens: array[int]) -> CapturePlan | None:
        """A file of *tokens*; None if it would be of no use, or is there."""
        if len(tokens) < self.min_gain or not self.cache.max_bytes:
            return None
        if isinstance(namespace, Private):
            return None  # nobody could ask for the file
        return self.cache.plan_store(namespace, tokens, len(tokens))

    def _begin(
        self, plan: CapturePlan, n_bytes: int, free: Callable[[], None]
    ) -> int | None:
        """Reserve room for a file; None, and the host memory is freed, if there is none."""
        reservation = self.cache.reserve(plan, n_bytes)
        if reservation is None:
            free()
            return None
        self._n_writes += 1
        self._writes[self._n_writes] = Writing(reservation, free)
        return self._n_writes

    def _adopt(self, state: KnownState) -> None:
        tokens, plan = state.tokens, None
        if state.n_bytes <= self._bound(len(tokens)):  # else a read takes any memory
            plan = self.cache.plan_store(state.namespace, tokens, len(tokens))
        reservation = None if plan is None else self.cache.reserve(plan, state.n_bytes)
        if reservation is None:
            self._superfluous.append(state.payload)
        else:
            self.cache.commit(reservation, state.payload, state.n_bytes)
