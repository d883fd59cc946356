"""
Host memory and files together: what they offer a sequence, and loads on their way.

A load from host memory is done by the next step. A file is read by another thread first,
while its sequence has a slot and no work and all others go on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pyllama_raw.core.memory.cache_entry import Hit
from pyllama_raw.core.memory.placement import Offer, Restore
from pyllama_raw.core.memory.tier import Tier
from pyllama_raw.core.namespace import Namespace
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Running, Sequence
from pyllama_raw.core.spans import Spans
from pyllama_raw.core.speed import Captures, CopyPrice, CopySpeed, PrefillSpeed
from pyllama_raw.core.step import (
    Fetch,
    Fetched,
    Load,
    Move,
    Piece,
    Save,
    StepResult,
    Written,
)


class Loading(NamedTuple):
    """A load that fills a slot; it counts as a hit once it has worked."""

    chosen: Restore
    seconds: float = 0.0  # that the file took
    payload: object = None  # of the file
    is_last: bool = True  # False: more of it follows


class Tiers:
    """Saves to both tiers and loads from them."""

    def __init__(
        self,
        host: Tier,
        disk: Tier,
        prefill: PrefillSpeed,
        captures: Captures,
        price: CopyPrice | None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.captures = host.captures = disk.captures = captures
        self.is_open = True  # False: nothing is saved or loaded any more
        self._by_name = {tier.name: tier for tier in (host, disk)}
        self._speeds = {
            name: CopySpeed(prefill, price.restore_s if price else 0.0)
            for name in self._by_name
        }
        self._loading: dict[int, Loading] = {}  # by slot, of the next step
        self._n_fetches = 0
        self._fetching: dict[int, Restore] = {}
        self._fetched: list[Fetched] = []  # not looked at yet

    def save(
        self,
        slot: int,
        namespace: Namespace,
        tokens: array[int],
        spans: Spans,
        n_prompt: int,
    ) -> list[Move]:
        """Moves that save what pays of a slot in host memory; see Tier.save()."""
        if not self.is_open:
            return []
        cache = self.host.cache
        return self.host.save(slot, namespace, tokens, cache, spans, n_prompt=n_prompt)

    def write(
        self,
        slot: int,
        namespace: Namespace,
        tokens: array[int],
        spans: Spans,
        n_prompt: int,
        *,
        is_whole: bool,
    ) -> list[Move]:
        """
        Moves that keep a slot in files, if that pays; see Tier.save().

        Args:
            is_whole: the slot is of use to others as it is.
        """
        if not self.is_open:
            return []
        host = self.host.cache
        moves = self.disk.save_snapshots(namespace, tokens, host, spans)
        if is_whole:
            moves += self.disk.save(
                slot, namespace, tokens, host, spans, n_prompt=n_prompt
            )
        return moves

    def offers(
        self, sequence: Sequence, n_most: int, n_cells: Callable[[], int]
    ) -> list[Offer]:
        """
        Offers of the tiers for the first *n_most* tokens, as far as *n_cells* are enough.

        What has rows of a span is worth a restore in any case, because they are not only to
        be computed: an encode makes them.
        """
        offers = []
        for tier in self._by_name.values() if self.is_open else ():
            if not tier.cache.stores:
                continue
            hit = tier.match(sequence, n_most)
            if not hit.n_tokens or n_cells_of(hit) > n_cells() or self._is_read(hit):
                continue
            if tier.can_hold(hit, self.host.cache):
                min_gain, spans = tier.min_gain, sequence.request.spans
                if not (spans and spans[0].start < hit.n_tokens):
                    n_worth = self._speeds[tier.name].n_worth(hit.n_bytes)
                    min_gain = max(min_gain, n_worth)
                offers.append(Offer(tier.name, hit, min_gain))
        return offers

    def _is_read(self, hit: Hit) -> bool:
        """Whether a sequence waits for the same file: those that follow it have it, too."""
        return any(
            hit.entries == other.hit.entries for other in self._fetching.values()
        )

    def is_worth_a_swap(self, n_tokens: int, n_prompt: int) -> bool:
        """Whether *n_tokens* are sooner saved and loaded again than computed."""
        if not (self.is_open and self.host.cache.stores):
            return False
        capture = self.captures.plan(0, n_tokens, n_prompt, in_parts=True)
        if capture is None or capture.stop < n_tokens:
            return False  # what is left of a swap is computed, so all of it is
        n_bytes = 2 * self.host.bound(n_tokens)  # both ways
        return n_tokens >= self._speeds[CacheTier.HOST].n_worth(n_bytes)

    def hold(self, chosen: Restore) -> None:
        """Keep what was chosen, until it is loaded or let go."""
        self._by_name[chosen.tier].hold(chosen.hit, self.host.cache)

    def fetch(self, chosen: Restore) -> Fetch:
        """Have the file that was chosen, and is held, read."""
        self._n_fetches += 1
        self._fetching[self._n_fetches] = chosen
        return Fetch(self._n_fetches, chosen.hit.entries[0].payload)

    def take_report(self, report: Written | Fetched) -> None:
        """A file was written or read, or could not be."""
        if isinstance(report, Written):
            self.disk.end_save(*report)
        else:
            self._fetched.append(report)

    def take_fetched(self) -> list[tuple[int, Loading | None]]:
        """The fetches that have ended, by id; None: there is nothing to load."""
        ended, self._fetched = self._fetched, []
        return [
            (fetched.fetch_id, self._loading_of(fetched))
            for fetched in ended
            if fetched.fetch_id in self._fetching
        ]

    def give_up(self, moves: Iterable[Move]) -> None:
        """Wait for no file of *moves*, which may not have been done; late reports are ignored."""
        for move in moves:
            if isinstance(move, Save) and move.tier is CacheTier.DISK:
                self.disk.end_save(move.save_id, None)
            elif isinstance(move, Fetch):
                self._fetched.append(Fetched(move.fetch_id, None, 0.0))

    def _loading_of(self, fetched: Fetched) -> Loading | None:
        chosen = self._fetching.pop(fetched.fetch_id)
        is_known = chosen.hit.entries[0].node is not None  # not cleared meanwhile
        if fetched.payload is None or not (is_known and self.is_open):
            self.let_go(chosen, failed=fetched.payload is None)
            return None
        return Loading(chosen, fetched.seconds, fetched.payload)

    def load(self, running: Running, loading: Loading, stop: int) -> Load:
        """Moves that fill the slot of *running* up to *stop*; settle() ends it if it is all."""
        hit, slot, start = loading.chosen.hit, running.slot, running.n_computed
        position = running.sequence.position
        self._loading[slot] = loading._replace(is_last=stop == hit.n_tokens)
        pieces = [
            Piece(
                loading.payload or span.entry.payload,
                position(max(start, span.start)),
                position(min(stop, span.stop)),
            )
            for span in hit.spans
            if start < span.stop and span.start < stop
        ]
        return Load(slot, tuple(pieces), position(stop - 1))

    def let_go(self, chosen: Restore, *, failed: bool = False) -> None:
        """Undo hold()."""
        self._by_name[chosen.tier].let_go(chosen.hit, self.host.cache, failed=failed)

    def settle(self, result: StepResult) -> list[int]:
        """Take in what a step has saved and loaded; the slots it could not fill."""
        failed = []
        for slot, (chosen, seconds, _, is_last) in self._loading.items():
            is_lost = slot in result.not_restored
            if is_lost:
                failed.append(slot)
            if not is_last:
                continue
            if not is_lost:
                took_s = seconds + result.restore_s.get(slot, 0.0)
                self._speeds[chosen.tier].observe(chosen.hit.n_bytes, took_s)
                self._by_name[chosen.tier].cache.record(chosen.hit, chosen.n_live)
            self.let_go(chosen, failed=is_lost)
        self._loading.clear()
        self.host.end_saves(result.saved)
        return failed

    def close(self) -> None:
        """Save and load nothing any more; what is in host memory is forgotten."""
        self.is_open = False
        self.host.cache.clear()

    def deletions(self) -> list[Move]:
        """Moves that delete files of no use; host memory is free at once."""
        return [*self.host.deletions(), *self.disk.deletions()]

    def clear(self, salt: str | None = None) -> int:
        """Forget what is kept of *salt*, None: all; the host bytes freed."""
        self.disk.cache.clear(salt)
        return self.host.cache.clear(salt)

    def check_integrity(self) -> None:
        """The conservation laws of both."""
        self.host.cache.check_integrity()
        self.disk.cache.check_integrity()


def n_cells_of(hit: Hit) -> int:
    """Cells a load takes: a piece is restored whole before its end is cut off."""
    return max((entry.stop for entry in hit.entries), default=0)
