"""
Tiers: states of slots that are kept in host memory and in files.

`Tier` is one of the two. `Tiers` is both: saves to them, what they offer a sequence,
and loads on their way. `ReadAhead` is a file for a sequence that has no slot yet. A load from host memory is done by the next step. A file is read
by another thread first, while its sequence has no work and all others go on.

Rules:
1. A state can be found when it is complete. Its bytes count before it is copied, and
   what it displaces goes first, so no limit is passed at any moment.
2. A file holds a whole state and stands alone. On its way to the disk and back the
   state is in host memory, lent by the cache of the host tier, and counts there.
3. A state that is to be loaded is held until that is done. If it cannot be loaded that
   is a miss, and the state goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple, Self

from pyllama_raw.core.costs import Captures, CopyPrice, CopySpeed, CostHistory
from pyllama_raw.core.memory.cache import PrefixCache, Reservation
from pyllama_raw.core.memory.placement import (
    Offer,
    Placement,
    Restore,
)
from pyllama_raw.core.memory.slots import Contents
from pyllama_raw.core.memory.snapshots import CapturePlan, Hit, SnapshotKind
from pyllama_raw.core.request import CacheTier, Namespace, Private, Spans, position
from pyllama_raw.core.sequence import Running, Sequence, n_reusable
from pyllama_raw.core.step import (
    Delete,
    Fetch,
    Fetched,
    FileKey,
    Load,
    Move,
    Piece,
    Save,
    Saved,
    Snapshot,
    StepResult,
    Written,
)

MIN_GAIN = 64  # tokens a file must have beyond what memory has


class Loading(NamedTuple):
    """A load that fills a slot; it counts as a hit once it has worked."""

    restore: Restore
    seconds: float = 0.0  # that the file took
    payload: object = None  # of the file
    is_last: bool = True  # False: more of it follows


class Tiers:
    """Saves to both tiers and loads from them."""

    def __init__(
        self,
        host: Tier,
        disk: Tier,
        prefill: CostHistory,
        captures: Captures,
        price: CopyPrice | None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.captures = host.captures = disk.captures = captures
        # What a step reports of a save is its id alone, so ids differ in all tiers.
        host.save_ids = disk.save_ids = count(1)
        self.is_open = True  # False: nothing is saved or loaded any more
        self._all = host, disk  # the nearest first
        self._by_name = {tier.name: tier for tier in self._all}
        self._speeds = {
            name: CopySpeed(prefill, price.restore_s if price else 0.0)
            for name in self._by_name
        }
        self._loading: dict[int, Loading] = {}  # by slot, of the next step
        self._n_fetches = 0
        self._fetching: dict[int, Restore] = {}
        self.fetched: list[Fetched] = []  # not looked at yet

    # -- saves -----------------------------------------------------------------------

    def save(self, contents: Contents) -> list[Move]:
        """Moves that save what pays of a slot in host memory; see Tier.save()."""
        return self.host.save(contents, self.host.cache) if self.is_open else []

    def write(self, contents: Contents, *, is_whole: bool) -> list[Move]:
        """
        Moves that keep a slot in files, if that pays; see Tier.save().

        Args:
            is_whole: the slot is of use to others as it is.
        """
        if not self.is_open:
            return []
        # Points on the way are in host memory; the end is in the slot itself.
        moves = self.disk.save_snapshots(contents, self.host.cache)
        if is_whole:
            moves += self.disk.save(contents, self.host.cache)
        return moves

    def is_worth_a_swap(self, n_tokens: int, n_prompt: int) -> bool:
        """Whether *n_tokens* are sooner saved and loaded again than computed."""
        if not (self.is_open and self.host.cache.stores):
            return False
        capture = self.captures.plan(0, n_tokens, n_prompt, in_parts=True)
        # A swap that is saved in part is computed in part, so all of it is.
        if capture is None or capture.stop < n_tokens:
            return False
        # The bytes go both ways.
        n_bytes = 2 * self.host.bound(n_tokens)
        return n_tokens >= self._speeds[CacheTier.HOST].n_worth(n_bytes)

    # -- loads -----------------------------------------------------------------------

    def offers(self, sequence: Sequence, n_most: int, n_cells: int) -> list[Offer]:
        """
        Offers for the first *n_most* tokens of *sequence*, of nearer tiers first.

        Args:
            n_cells: there are so many for it.
        """
        offers = []
        for tier in self._all if self.is_open else ():
            if not tier.cache.stores:
                continue
            hit = tier.match(sequence, n_most)
            if not hit.n_tokens or hit.n_cells > n_cells:
                continue
            # Another sequence waits for this file, and can be followed.
            if any(
                hit.entries == other.hit.entries for other in self._fetching.values()
            ):
                continue
            # A file on its way takes host memory, which has no room for it.
            if tier.is_on_disk and not self.host.cache.can_lend(hit.n_bytes):
                continue
            min_gain, spans = tier.min_gain, sequence.request.spans
            # Rows of a span are always worth a restore, because an encode makes them.
            if not (spans and spans[0].start < hit.n_tokens):
                n_worth = self._speeds[tier.name].n_worth(hit.n_bytes)
                min_gain = max(min_gain, n_worth)
            offers.append(Offer(tier.name, hit, min_gain))
        return offers

    def hold(self, restore: Restore) -> None:
        """Keep what is to be restored, until it is loaded or let go."""
        self._by_name[restore.tier].hold(restore.hit, self.host.cache)

    def let_go(self, restore: Restore, *, failed: bool = False) -> None:
        """Undo hold()."""
        self._by_name[restore.tier].let_go(restore.hit, self.host.cache, failed=failed)

    def fetch(self, restore: Restore) -> Fetch:
        """Have a file, which is held, read."""
        self._n_fetches += 1
        self._fetching[self._n_fetches] = restore
        return Fetch(self._n_fetches, restore.hit.entries[0].payload)

    def take_report(self, report: Written | Fetched) -> None:
        """A file was written or read, or could not be."""
        if isinstance(report, Fetched):
            self.fetched.append(report)
            return
        for tier in self._all:
            tier.end_save(*report)

    def take_fetched(self) -> list[tuple[int, Loading | None]]:
        """The fetches that have ended, by id; None: there is nothing to load."""
        fetched, self.fetched = self.fetched, []
        ended: list[tuple[int, Loading | None]] = []
        for fetch_id, payload, seconds in fetched:
            restore = self._fetching.pop(fetch_id, None)
            # A late report: the fetch was given up.
            if restore is None:
                continue
            loading = None
            is_cleared = restore.hit.entries[0].node is None
            if payload is None or is_cleared or not self.is_open:
                self.let_go(restore, failed=payload is None)
            else:
                loading = Loading(restore, seconds, payload)
            ended.append((fetch_id, loading))
        return ended

    def load(self, running: Running, loading: Loading, stop: int) -> Load:
        """The move that fills the slot of *running* up to *stop*; see settle()."""
        hit, slot, start = loading.restore.hit, running.slot, running.n_computed
        position_of = running.sequence.position
        self._loading[slot] = loading._replace(is_last=stop == hit.n_tokens)
        pieces = [
            Piece(
                loading.payload or span.entry.payload,
                position_of(max(start, span.start)),
                position_of(min(stop, span.stop)),
            )
            for span in hit.spans
            if start < span.stop and span.start < stop
        ]
        return Load(slot, tuple(pieces), position_of(stop - 1))

    # -- before and after a step -------------------------------------------------------

    def deletions(self) -> list[Move]:
        """Moves that delete files of no use; host memory is free at once."""
        return [move for tier in self._all for move in tier.deletions()]

    def settle(self, result: StepResult) -> list[int]:
        """Take in what a step has saved and loaded; the slots it could not fill."""
        failed = []
        for slot, (restore, seconds, _, is_last) in self._loading.items():
            is_lost = slot in result.not_restored
            if is_lost:
                failed.append(slot)
            # More of a file follows, which is held until all of it is there.
            if not is_last:
                continue
            if not is_lost:
                took_s = seconds + result.restore_s.get(slot, 0.0)
                self._speeds[restore.tier].observe(restore.hit.n_bytes, took_s)
                self._by_name[restore.tier].cache.record(restore.hit, restore.n_live)
            self.let_go(restore, failed=is_lost)
        self._loading.clear()
        # All saves to host memory have ended with the step.
        for save_id in tuple(self.host.saves):
            self.host.end_save(save_id, result.saved.get(save_id))
        return failed

    def give_up(self, moves: Iterable[Move]) -> None:
        """Wait for no save and no file of *moves*, which perhaps were not done."""
        for move in moves:
            if isinstance(move, Save):
                self._by_name[move.tier].end_save(move.save_id, None)
            elif isinstance(move, Fetch):
                self.fetched.append(Fetched(move.fetch_id, None, 0.0))

    def clear(self, salt: str | None = None) -> int:
        """Forget what is kept of *salt*, None: all; the host bytes freed."""
        # What a file takes is no memory.
        freed = [(tier.cache.clear(salt), tier.is_on_disk) for tier in self._all]
        return sum(n_bytes for n_bytes, is_on_disk in freed if not is_on_disk)

    def close(self) -> None:
        """Save and load nothing any more; what is in host memory is forgotten."""
        self.is_open = False
        for tier in self._all:
            if not tier.is_on_disk:
                tier.cache.clear()

    def check_integrity(self) -> None:
        """The conservation laws of each tier."""
        for tier in self._all:
            tier.cache.check_integrity()


@dataclass(slots=True, eq=False)
class EarlyFile:
    """A file, which is held, that is read for a sequence without a slot."""

    sequence: Sequence
    restore: Restore
    fetch_id: int
    loading: Loading | None = None  # None: it is not read yet


@dataclass(slots=True, eq=False)
class ReadAhead:
    """
    The file that is read while the sequence that needs it waits for a slot.

    One at a time, of the sequence that gets the next slot, and only if the host memory that
    it takes leaves as much to those that run. A sequence that gets a slot takes it, read or on
    its way, unless something else has as much by then; another one with the same beginning may
    take it before. Who does without lets go of it: at once if it is read, else when the report
    comes.
    """

    tiers: Tiers
    has_files: bool  # whether there can be any
    file: EarlyFile | None = None
    last: Sequence | None = None  # that was asked about

    def asks_about(self, sequence: Sequence) -> bool:
        """Whether *sequence*, the next to get a slot, may need a file; says yes once."""
        if self.file is not None or sequence is self.last:
            return False
        self.last = sequence
        return True

    def read(self, sequence: Sequence, start: Placement) -> list[Fetch]:
        """Begin to read what *start* restores for *sequence*, if that is a file."""
        if not isinstance(start, Restore) or not start.tier.is_file:
            return []
        if not self.tiers.host.cache.can_lend(2 * start.hit.n_bytes):
            return []
        self.tiers.hold(start)
        fetch = self.tiers.fetch(start)
        self.file = EarlyFile(sequence, start, fetch.fetch_id)
        return [fetch]

    def take_report(self, fetch_id: int, loading: Loading | None) -> bool:
        """Whether the fetch was for this; None: nothing could be read."""
        file = self.file
        if file is None or file.fetch_id != fetch_id:
            return False
        file.loading = loading
        self.file = file if loading is not None else None
        return True

    def take(
        self, sequence: Sequence, start: Placement, n_cells: int
    ) -> EarlyFile | None:
        """
        The file, which there is, if *sequence* begins with it and has nothing better.

        Args:
            sequence: gets a slot.
            start: what it would start from without.
            n_cells: those that it could have.
        """
        file = self.file
        assert file is not None
        hit, other = file.restore.hit, file.sequence
        n_tokens = hit.n_tokens
        if sequence is not other and (
            sequence.request.namespace != other.request.namespace
            or n_tokens > n_reusable(sequence)
            or sequence.tokens[:n_tokens] != other.tokens[:n_tokens]
        ):
            return None
        # Something else may have come up since, such as a slot that has as much.
        other_start = start.hit if isinstance(start, Restore) else start
        is_same = isinstance(start, Restore) and start.hit.entries == hit.entries
        n_other = 0 if is_same else other_start.n_tokens
        is_cleared = hit.entries[0].node is None
        is_worth = n_tokens >= n_other + self.tiers.disk.min_gain
        if (
            is_worth
            and hit.n_cells <= n_cells
            and self.tiers.is_open
            and not is_cleared
        ):
            self.file = None
            return file
        self.drop(sequence)
        return None

    def drop(self, sequence: Sequence) -> None:
        """*sequence* has ended, or does without."""
        file = self.file
        if file is not None and file.sequence is sequence:
            self.file = None
            if file.loading is not None:
                self.tiers.let_go(file.restore)


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """What a state costs, as measured when the context was made."""

    base_bytes: int = 0
    token_bytes: int = 0
    price: CopyPrice | None = None  # None: not measured

    def bound(self, n_tokens: int) -> int:
        """No state of *n_tokens* is larger."""
        return self.base_bytes + self.token_bytes * n_tokens


class StoredState(NamedTuple):
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
        stored: Iterable[StoredState] = (),
    ) -> None:
        """
        Args:
            cache: the index; of files, with states that stand alone.
            bound: no state of so many tokens is larger; its tokens are not counted.
            stored: what is there already, from the one used longest ago to the latest.
        """
        # Captures of all tiers together take the time of one step, and no two saves have one id;
        # `Tiers` sets both.
        self.captures = Captures(None, CostHistory(), 0.0)
        self.save_ids = count(1)
        self.name = name
        self.cache = cache
        self.is_on_disk = name is CacheTier.DISK
        assert not (self.is_on_disk and cache.kind.is_part)
        self.min_gain = MIN_GAIN if self.is_on_disk else 1
        self.bound = bound
        self.saves: dict[int, Saving] = {}  # on their way, by id
        for state in stored:
            tokens, plan, reservation = state.tokens, None, None
            # A file that is larger than its tokens allow would be read into any memory.
            if state.n_bytes <= bound(len(tokens)):
                plan = cache.plan_store(state.namespace, tokens, len(tokens))
            if plan is not None:
                reservation = cache.reserve(plan, state.n_bytes)
            if reservation is None:
                self.cache.released.append(state.payload)
            else:
                cache.commit(reservation, state.payload, state.n_bytes)

    @classmethod
    def without_files(cls) -> Self:
        """A tier of files that keeps none."""
        empty = PrefixCache(SnapshotKind.STATE, max_bytes=0, max_entries=0)
        return cls(CacheTier.DISK, empty, lambda _: 0)

    # -- saving --------------------------------------------------------------------

    def save(self, contents: Contents, host: PrefixCache) -> list[Move]:
        """
        Moves that save what a slot holds; none if all is stored, or none pays.

        Args:
            host: lends the memory for a state on its way to a file.
        """
        slot, _, tokens, spans, n_prompt = contents
        plan = self._plan(contents, len(tokens))
        if plan is None:
            return []
        # A beginning is of use where each token is kept once, unless it cuts a span.
        in_parts = self.cache.kind is SnapshotKind.RANGE and not spans
        capture = self.captures.plan(plan.start, plan.stop, n_prompt, in_parts=in_parts)
        if capture is None:
            return []
        if capture.stop < plan.stop:
            plan = self._plan(contents, capture.stop)
            assert plan is not None
        n_bytes, free = self.bound(plan.stop - plan.start), _nothing
        # Until a file is written its state takes host memory.
        if self.is_on_disk:
            if not host.lend(n_bytes):
                return []
            free = partial(host.give_back, n_bytes)
        moves = self._begin(plan, slot, n_bytes, free, spans, n_runs=capture.n_runs)
        if moves:
            self.captures.spend(capture, capture.stop - plan.start)
        return moves

    def save_snapshots(self, contents: Contents, host: PrefixCache) -> list[Move]:
        """
        Moves that write the snapshots of *host* on the path of a slot to files.

        Only memory that is of use as a whole needs them, and a file cannot hold a part.
        """
        exact = SnapshotKind.EXACT
        if not (self.cache.kind is host.kind is exact and self.cache.max_bytes):
            return []
        # From the last point to the first, each a file of its own.
        moves: list[Move] = []
        _, namespace, tokens, spans, _ = contents
        limit = len(tokens) - 1
        while limit > 0 and (hit := host.match(namespace, tokens, limit)).entries:
            (entry,), limit = hit.entries, hit.n_tokens - 1
            plan = self._plan(contents, hit.n_tokens)
            if plan is not None:
                host.pin(hit)
                n_bytes, source = self.bound(hit.n_tokens), Snapshot(entry.payload)
                free = partial(host.unpin, hit)
                moves += self._begin(plan, source, n_bytes, free, spans)
        return moves

    def _plan(self, contents: Contents, n_tokens: int) -> CapturePlan | None:
        """Plan a save of the first *n_tokens*; None if it is of no use, or there."""
        if not self.cache.stores:
            return None
        _, namespace, tokens, spans, _ = contents
        if self.is_on_disk and (
            # Computed sooner than read,
            n_tokens < self.min_gain
            # or there is nobody who could ask for the file,
            or isinstance(namespace, Private)
            # or nothing to tell rows of an image by in another process.
            or not all(span.key for span in spans if span.start < n_tokens)
        ):
            return None
        return self.cache.plan_store(namespace, tokens, n_tokens)

    def _begin(
        self,
        plan: CapturePlan,
        source: int | Snapshot,
        n_bytes: int,
        free: Callable[[], None],
        spans: Spans,
        *,
        n_runs: int = 1,
    ) -> list[Move]:
        """Reserve room for a state and save it; without room free its host memory."""
        reservation = self.cache.reserve(plan, n_bytes)
        if reservation is None:
            free()
            return []
        save_id = next(self.save_ids)
        self.saves[save_id] = Saving(reservation, free, n_runs)
        key = None
        if self.is_on_disk:
            assert not isinstance(plan.namespace, Private)  # see _plan()
            spans_in_it = tuple(span for span in spans if span.start < plan.stop)
            key = FileKey(plan.namespace, plan.key, spans_in_it)
        start, stop = position(spans, plan.start), position(spans, plan.stop)
        save = Save(save_id, self.name, source, start, stop, n_bytes, key)
        # What the state displaces goes first.
        return [*self.deletions(), save]

    def end_save(self, save_id: int, saved: Saved | None) -> None:
        """The state is complete; None: there is none. Unknown ids are ignored."""
        saving = self.saves.pop(save_id, None)
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

    def deletions(self) -> list[Move]:
        """Moves that delete the states that left the index since the last call."""
        if not self.cache.released:  # as in most steps
            return []
        released = self.cache.take_released()
        return [Delete(tuple(released))] if self.is_on_disk else []

    # -- loading -------------------------------------------------------------------

    def match(self, sequence: Sequence, n_most: int) -> Hit:
        """Find what can be loaded of the first *n_most* tokens of *sequence*."""
        namespace, tokens = sequence.request.namespace, sequence.tokens
        hit = self.cache.match(namespace, tokens, n_most)
        # One that ends inside a span is of use up to where that begins.
        while (n_whole := sequence.whole(hit.n_tokens)) < hit.n_tokens:
            hit = self.cache.match(namespace, tokens, n_whole)
        return hit

    def hold(self, hit: Hit, host: PrefixCache) -> None:
        """Keep *hit*, which was just found, until let_go()."""
        self.cache.pin(hit)
        # A file is read to host memory first.
        if self.is_on_disk:
            lent = host.lend(hit.n_bytes)
            assert lent, "can_lend() comes first"

    def let_go(self, hit: Hit, host: PrefixCache, *, failed: bool = False) -> None:
        """Undo one hold(); what has *failed* is not tried again."""
        if self.is_on_disk:
            host.give_back(hit.n_bytes)
        self.cache.unpin(hit)
        if failed:
            self.cache.drop(hit.entries[0])


def _nothing() -> None:
    """A state in host memory takes no other."""
