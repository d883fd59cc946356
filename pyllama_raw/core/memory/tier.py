"""
One place where states of slots are kept: host memory, or files.

Rules:
1. A state can be found when it is complete. Its bytes count before it is copied, and what
   it displaces goes first, so no limit is passed at any moment.
2. A file holds a whole state and stands alone. On its way to the disk and back the state
   is in host memory, which is lent by the cache of the host tier and counts there.
3. A state that is to be loaded is held until that is done. If it cannot be loaded that is
   a miss, and the state goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

from pyllama_raw.core.memory.cache_entry import CapturePlan, Hit, Reservation
from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.namespace import Namespace, Private
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.spans import Spans, position
from pyllama_raw.core.speed import Captures, CopyPrice, PrefillSpeed
from pyllama_raw.core.step import Delete, FileKey, Move, Save, Saved, Snapshot

MIN_GAIN = 64  # tokens a file must have beyond what memory has


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """What a state costs, as measured when the context was made."""

    base_bytes: int = 0
    token_bytes: int = 0
    price: CopyPrice | None = None  # None: not measured

    def bound(self, n_tokens: int) -> int:
        """No state of *n_tokens* is larger."""
        return self.base_bytes + self.token_bytes * n_tokens


class KnownState(NamedTuple):
    """A file that is there at the start."""

    namespace: Namespace
    tokens: array[int]
    payload: object
    n_bytes: int  # without those of the tokens, which the cache counts itself


class Saving(NamedTuple):
    """A state on its way."""

    reservation: Reservation
    free: Callable[[], None]  # the host memory that it takes meanwhile
    n_runs: int = 1  # of cells that are captured


class Tier:
    """An index of states, and the moves that save them."""

    def __init__(
        self,
        name: CacheTier,
        cache: PrefixCache,
        bound: Callable[[int], int],
        known: Iterable[KnownState] = (),
    ) -> None:
        """
        Args:
            cache: the index; of files, with states that stand alone.
            bound: no state of so many tokens is larger; its tokens are not counted.
            known: what is there already, from the one used longest ago to the latest.
        """
        # Captures of all tiers together take the time of one step; `Tiers` sets them.
        self.captures = Captures(None, PrefillSpeed(), 0.0)
        self.name = name
        self.cache = cache
        self.is_on_disk = name is CacheTier.DISK
        assert not (self.is_on_disk and cache.kind.is_part)
        self.min_gain = MIN_GAIN if self.is_on_disk else 1
        self.bound = bound
        self._n_saves = 0
        self._saves: dict[int, Saving] = {}
        self._superfluous: list[object] = []  # files found that are not in the index
        for state in known:
            self._adopt(state)

    @classmethod
    def without_files(cls) -> Self:
        """A tier of files that keeps none."""
        none = PrefixCache(SnapshotKind.STATE, max_bytes=0, max_entries=0)
        return cls(CacheTier.DISK, none, lambda _: 0)

    # -- saving --------------------------------------------------------------------

    def save(
        self,
        slot: int,
        namespace: Namespace,
        tokens: array[int],
        host: PrefixCache,
        spans: Spans = (),
        *,
        n_prompt: int = 0,
    ) -> list[Move]:
        """
        Moves that save *slot*, which holds *tokens*; none if all is known, or none pays.

        Args:
            host: lends the memory for a state on its way to a file.
            n_prompt: tokens before that one were computed in chunks.
        """
        plan = self._plan(namespace, tokens, spans)
        if plan is None:
            return []
        # A beginning is of use where each token is kept once. One that ends in a span is not.
        in_parts = self.cache.kind is SnapshotKind.RANGE and not spans
        capture = self.captures.plan(plan.start, plan.stop, n_prompt, in_parts=in_parts)
        if capture is None:
            return []
        if capture.stop < plan.stop:
            plan = self._plan(namespace, tokens[: capture.stop], spans)
            assert plan is not None
        n_bytes = self.bound(plan.stop - plan.start)
        free = _nothing
        if self.is_on_disk:
            if not host.lend(n_bytes):
                return []
            free = partial(host.give_back, n_bytes)
        moves = self._begin(plan, slot, n_bytes, free, spans, n_runs=capture.n_runs)
        if moves:
            self.captures.spend(capture, capture.stop - plan.start)
        return moves

    def save_snapshots(
        self,
        namespace: Namespace,
        tokens: array[int],
        host: PrefixCache,
        spans: Spans = (),
    ) -> list[Move]:
        """
        Moves that write the snapshots of *host* on the path of *tokens* to files.

        Only memory that is of use as a whole needs them, and a file cannot hold a part.
        """
        whole = SnapshotKind.EXACT
        if not (self.cache.kind is host.kind is whole and self.cache.max_bytes):
            return []
        moves: list[Move] = []
        limit = len(tokens) - 1
        while limit > 0 and (hit := host.match(namespace, tokens, limit)).entries:
            (entry,), limit = hit.entries, hit.n_tokens - 1
            plan = self._plan(namespace, tokens[: hit.n_tokens], spans)
            if plan is not None:
                host.pin(hit)
                n_bytes = self.bound(hit.n_tokens)
                source = Snapshot(entry.payload)
                free = partial(host.unpin, hit)
                moves += self._begin(plan, source, n_bytes, free, spans)
        return moves

    def end_save(self, save_id: int, saved: Saved | None) -> None:
        """The state is complete; None: there is none. Unknown ids are ignored."""
        saving = self._saves.pop(save_id, None)
        if saving is None:
            return
        reservation, free, n_runs = saving
        free()
        if saved is None:
            self.cache.abandon(reservation)
        else:
            n_tokens = reservation.plan.stop - reservation.plan.start
            self.captures.observe(n_tokens, n_runs, saved.seconds)
            self.cache.commit(reservation, saved.payload, saved.n_bytes)

    def end_saves(self, saved: Mapping[int, Saved]) -> None:
        """A step is over, and with it all saves to host memory."""
        for save_id in () if self.is_on_disk else tuple(self._saves):
            self.end_save(save_id, saved.get(save_id))

    def deletions(self) -> list[Move]:
        """Moves that delete the states that left the index since the last call."""
        released = self._superfluous + self.cache.take_released()
        self._superfluous = []
        return [Delete(tuple(released))] if released and self.is_on_disk else []

    # -- loading -------------------------------------------------------------------

    def match(self, sequence: Sequence, n_most: int) -> Hit:
        """Find what can be loaded of the first *n_most* tokens of *sequence*."""
        namespace, tokens = sequence.request.namespace, sequence.tokens
        hit = self.cache.match(namespace, tokens, n_most)
        while (n_whole := sequence.whole(hit.n_tokens)) < hit.n_tokens:
            hit = self.cache.match(namespace, tokens, n_whole)
        return hit

    def can_hold(self, hit: Hit, host: PrefixCache) -> bool:
        """Whether *host* has room for *hit* on its way from a file."""
        return not self.is_on_disk or host.can_lend(hit.n_bytes)

    def hold(self, hit: Hit, host: PrefixCache) -> None:
        """Keep *hit*, which was just found, until let_go()."""
        self.cache.pin(hit)
        if self.is_on_disk:
            lent = host.lend(hit.n_bytes)
            assert lent, "can_hold() comes first"

    def let_go(self, hit: Hit, host: PrefixCache, *, failed: bool = False) -> None:
        """Undo one hold(); what has *failed* is not tried again."""
        if self.is_on_disk:
            host.give_back(hit.n_bytes)
        self.cache.unpin(hit)
        if failed:
            self.cache.drop(hit.entries[0])

    # -- helpers -------------------------------------------------------------------

    def _plan(
        self, namespace: Namespace, tokens: array[int], spans: Spans
    ) -> CapturePlan | None:
        """Plan a save of *tokens*; None if it would be of no use, or is there."""
        if not self.cache.stores:
            return None
        if self.is_on_disk and (
            len(tokens) < self.min_gain
            or isinstance(namespace, Private)
            or not all(span.key for span in spans if span.start < len(tokens))
        ):
            return None  # computed sooner than read; nobody could ask for the file
        return self.cache.plan_store(namespace, tokens, len(tokens))

    def _begin(
        self,
        plan: CapturePlan,
        source: int | Snapshot,
        n_bytes: int,
        free: Callable[[], None],
        spans: Spans = (),
        *,
        n_runs: int = 1,
    ) -> list[Move]:
        """Reserve room for a state; nothing, and its host memory is free, without room."""
        reservation = self.cache.reserve(plan, n_bytes)
        if reservation is None:
            free()
            return []
        self._n_saves += 1
        self._saves[self._n_saves] = Saving(reservation, free, n_runs)
        key = None
        if self.is_on_disk:
            assert not isinstance(plan.namespace, Private)  # see _plan()
            held = tuple(span for span in spans if span.start < plan.stop)
            key = FileKey(plan.namespace, plan.key, held)
        start, stop = position(spans, plan.start), position(spans, plan.stop)
        save = Save(self._n_saves, self.name, source, start, stop, n_bytes, key)
        return [*self.deletions(), save]

    def _adopt(self, state: KnownState) -> None:
        tokens, plan = state.tokens, None
        if state.n_bytes <= self.bound(len(tokens)):  # else a read takes any memory
            plan = self.cache.plan_store(state.namespace, tokens, len(tokens))
        reservation = None if plan is None else self.cache.reserve(plan, state.n_bytes)
        if reservation is None:
            self._superfluous.append(state.payload)
        else:
            self.cache.commit(reservation, state.payload, state.n_bytes)


def _nothing() -> None:
    """A state in host memory takes no other."""
