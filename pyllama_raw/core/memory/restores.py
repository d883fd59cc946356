"""
Sequences whose slots are filled from host memory or from files.

What is in host memory is loaded by the next step. A file is read by another thread first,
while its sequence has a slot and no work; it is then loaded in portions, one a step, so that
all others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyllama_raw.core.memory.keeping import Keeping
from pyllama_raw.core.memory.placement import Restore
from pyllama_raw.core.memory.slots import Slots
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.memory.snapshot_points import Points
from pyllama_raw.core.memory.tiers import Loading, Tiers, n_cells_of
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.spans import border

LOAD_TOKENS = 128  # of a file, in a step of others


class Restores:
    """
    Sequences that are filled from a tier, from the choice to the end.

    A restore that fails leaves an empty slot: it is in `emptied`, to be filled again.
    """

    def __init__(
        self, slots: Slots, tiers: Tiers, keeping: Keeping, points: Points
    ) -> None:
        self.load_tokens = LOAD_TOKENS
        self.emptied: list[Running] = []
        self._slots = slots
        self._tiers = tiers
        self._keeping = keeping
        self._points = points
        self._fetchers: dict[
            int, Running
        ] = {}  # those that wait for a file, by fetch_id
        self._loads: dict[int, Loading] = {}  # files that were read, by fetch_id

    @property
    def is_fetching(self) -> bool:
        """Whether a sequence with a slot waits for a file."""
        return bool(self._fetchers)

    @property
    def is_loading(self) -> bool:
        """Whether the next plan loads more of a file."""
        return bool(self._loads)

    def begin(self, running: Running, chosen: Restore) -> None:
        """Fill the slot of *running*, which is empty, with what was chosen and is held."""
        if chosen.tier is CacheTier.DISK:
            fetch = self._tiers.fetch(chosen)
            self._slots.add([fetch])
            self._fetchers[fetch.fetch_id] = running
            running.fetch_id = fetch.fetch_id
        else:
            self._load(running, Loading(chosen), chosen.hit.n_tokens)

    def go_on(self) -> None:
        """Take in which files were read, and load one of them or a portion of it."""
        for fetch_id, loading in self._tiers.take_fetched():
            running = self._fetchers.get(fetch_id)
            if loading is not None and running is not None:
                self._loads[fetch_id] = loading
            elif loading is not None:
                self._tiers.let_go(loading.chosen)
            elif running is not None:
                self.end(running)
                self.emptied.append(running)
        if self._loads:
            self._load_file()

    def _load_file(self) -> None:
        """Load what was read first: a portion while others go on, if memory has portions."""
        fetch_id, loading = next(iter(self._loads.items()))
        running, hit = self._fetchers[fetch_id], loading.chosen.hit
        start, stop = running.n_computed, hit.n_tokens
        has_portions = self._slots.limits.kind is SnapshotKind.RANGE
        if has_portions and len(self._slots.running) > len(self._fetchers):
            stop = self._portion(running, start, stop)
        has_cells = n_cells_of(hit) - start <= self._slots.n_not_running
        if not (has_cells and self._tiers.is_open):
            self.end(running)
            self._slots.rewind(running, 0)
            self.emptied.append(running)
            return
        if stop == hit.n_tokens:
            del self._loads[fetch_id]
            self.end(running)
        self._load(running, loading, stop)

    def _portion(self, running: Running, start: int, stop: int) -> int:
        """The end of a portion of [start, stop), because a span is loaded as a whole."""
        whole = running.sequence.whole(min(stop, start + self.load_tokens))
        return whole if whole > start else border(running.request.spans, start) or stop

    def _load(self, running: Running, loading: Loading, stop: int) -> None:
        """Fill the slot of *running* from host memory, up to *stop*."""
        start, hit = running.n_computed, loading.chosen.hit
        self._keeping.reclaim(n_cells_of(hit) - start)
        load = self._tiers.load(running, loading, stop)
        self._slots.load(running, stop, load)
        if stop == hit.n_tokens:
            running.note_cached(loading.chosen.tier)
            self._points.plan(running)

    def settle(self, failed: Iterable[int]) -> None:
        """The slots *failed* could not be filled."""
        for slot in failed:
            running = self._slots.all[slot]
            if isinstance(running, Running):
                if running.fetch_id is not None:
                    self.end(running, failed=True)
                self.emptied.append(running)  # the next best may be had

    def take_emptied(self) -> Iterator[Running]:
        """Take out the sequences that have nothing and wait for nothing."""
        emptied, self.emptied = self.emptied, []
        for running in emptied:
            waits = running.fetch_id is not None
            if self._slots.is_here(running) and not (waits or running.n_computed):
                yield running

    def end(self, running: Running, *, failed: bool = False) -> None:
        """*running* does not wait for its file any more."""
        assert running.fetch_id is not None
        del self._fetchers[running.fetch_id]
        loading = self._loads.pop(running.fetch_id, None)
        if loading is not None:
            self._tiers.let_go(loading.chosen, failed=failed)
        running.fetch_id = None

    def check_integrity(self) -> None:
        """A sequence that waits for a file has a slot, which is empty until the file is loaded."""
        for fetch_id, running in self._fetchers.items():
            assert running.fetch_id == fetch_id
            assert self._slots.is_here(running)
            assert running.n_computed == 0 or fetch_id in self._loads
