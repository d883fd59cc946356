"""KV memory of a context, on lists: what `FakeExecutor` runs plans on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from pyllama_raw.core.limits import ContextLimits
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.step import (
    Copy,
    Delete,
    Fetch,
    Fetched,
    FileMove,
    Load,
    Move,
    Release,
    Save,
    Saved,
    Shift,
    Snapshot,
    Trim,
    Written,
)

HEAD_BYTES, TOKEN_BYTES = 4, 10  # of a snapshot here

Payload = tuple[int, tuple[int, ...]]


class Cell(NamedTuple):
    """One position of a slot; copies share cells, as unified KV does."""

    number: int
    token: int


class FakeFile(NamedTuple):
    """What a write leaves."""

    number: int
    tokens: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return HEAD_BYTES + TOKEN_BYTES * len(self.tokens)


class FakeMemory:
    """
    Does memory operations and asserts what libllama would.

    Args:
        fails: asked before each save, fetch, load and trim; true: it fails. A trim that
            fails is refused, and from the next run() on must not be asked for.
    """

    def __init__(
        self,
        limits: ContextLimits,
        fails: Callable[[Move], bool] = lambda _: False,
    ) -> None:
        self.limits = limits
        self.slots: list[list[Cell]] = [
            [] for _ in range(limits.n_slots + limits.n_parked)
        ]
        self.shifted: set[int] = set()  # slots whose tokens are no prefix any more
        self._fails = fails
        self.files: set[FakeFile] = set()  # complete ones
        self.writing: list[tuple[int, FakeFile | None]] = []  # until end_write()
        self.reading: list[tuple[int, FakeFile | None]] = []  # until end_fetch()
        self._numbers = count()
        self.refuses_cuts = False  # has refused one
        self._must_not_cut = limits.kind is SnapshotKind.EXACT
        self._lost: set[int] = set()
        self._saved: dict[int, Saved] = {}

    @property
    def n_used(self) -> int:
        """Distinct cells."""
        return len({cell.number for cells in self.slots for cell in cells})

    def tokens(self, slot: int) -> list[int]:
        return [cell.token for cell in self.slots[slot]]

    def write(self, slot: int, tokens: Iterable[int]) -> None:
        """Fill new cells."""
        cells = self.slots[slot]
        cells.extend(Cell(next(self._numbers), token) for token in tokens)
        assert len(cells) <= self.limits.n_ctx_slot

    def clear(self) -> None:
        for cells in self.slots:
            cells.clear()
        self.shifted.clear()

    def run(self, moves: Iterable[Move]) -> tuple[dict[int, Saved], frozenset[int]]:
        """Do all in order; what was saved in host memory, and slots that are empty."""
        self._lost, self._saved = set(), {}
        for move in moves:
            self._do(move)
        self._must_not_cut = self._must_not_cut or self.refuses_cuts
        return self._saved, frozenset(self._lost)

    def _do(self, move: Move) -> None:
        match move:
            case Release(slot):
                self.slots[slot] = []
                self.shifted.discard(slot)
                self._lost.discard(slot)
            case Trim():
                self._trim(move)
            case Shift():
                self._shift(move)
            case Copy():
                self._copy(move)
            case Save():
                self._save(move)
            case Load():
                self._load(move)
            case Fetch() | Delete():
                self._do_with_files(move)

    def _do_with_files(self, move: FileMove) -> None:
        match move:
            case Fetch(fetch_id, file):
                assert isinstance(file, FakeFile)
                is_read = file in self.files and not self._fails(move)
                self.reading.append((fetch_id, file if is_read else None))
            case Delete(payloads):
                self.files.difference_update(payloads)

    def _trim(self, trim: Trim) -> None:
        slot, n_tokens = trim
        n_held = len(self.slots[slot])
        assert n_held >= n_tokens or slot in self._lost
        self._check_cut(slot, n_tokens)
        if 0 < n_tokens < n_held and self._fails(trim):
            self.slots[slot] = []
            self._lost.add(slot)
            self.refuses_cuts = True
        del self.slots[slot][n_tokens:]

    def end_write(self, *, fails: bool = False) -> Written:
        """Complete the oldest file, or fail; what the scheduler is to be told."""
        save_id, file = self.writing.pop(0)
        if fails or file is None:
            return Written(save_id, None)
        self.files.add(file)
        return Written(save_id, Saved(file, file.n_bytes))

    def end_fetch(self, *, fails: bool = False) -> Fetched:
        """Have the oldest file read, or fail; what the scheduler is to be told."""
        fetch_id, file = self.reading.pop(0)
        payload = None if fails or file is None else (0, file.tokens)
        return Fetched(fetch_id, payload, 0.0)

    def _check_cut(self, slot: int, n_tokens: int) -> None:
        if self._must_not_cut:
            assert n_tokens in (0, len(self.slots[slot])), "this memory cannot be cut"

    def _shift(self, shift: Shift) -> None:
        assert self.limits.can_shift
        cells = self.slots[shift.slot]
        mine = {cell.number for cell in cells}
        for slot, others in enumerate(self.slots):
            shared = mine & {cell.number for cell in others}
            assert slot == shift.slot or not shared, "shared cells keep their position"
        assert shift.n_keep + shift.n_discard <= len(cells)
        del cells[shift.n_keep : shift.n_keep + shift.n_discard]
        self.shifted.add(shift.slot)

    def _copy(self, copy: Copy) -> None:
        assert not self.slots[copy.dst], "copies go to empty slots"
        assert copy.src not in self.shifted
        if copy.src in self._lost:
            self._lost.add(copy.dst)
            return
        assert len(self.slots[copy.src]) >= copy.n_tokens
        self._check_cut(copy.src, copy.n_tokens)
        cells = self.slots[copy.src][: copy.n_tokens]
        if self.limits.unified:
            self.slots[copy.dst] = cells
        else:
            self.write(copy.dst, [cell.token for cell in cells])

    def _save(self, save: Save) -> None:
        payload = self._payload(save)
        if save.tier is CacheTier.DISK:
            file = None
            if payload is not None:
                file = FakeFile(save.save_id, payload[1])
                assert save.key is not None
                assert array("i", file.tokens).tobytes() == save.key.tokens
                assert file.n_bytes <= save.max_bytes
            self.writing.append((save.save_id, file))
        elif payload is not None:
            n_bytes = HEAD_BYTES + TOKEN_BYTES * len(payload[1])
            if n_bytes <= save.max_bytes:
                self._saved[save.save_id] = Saved(payload, n_bytes)

    def _payload(self, save: Save) -> Payload | None:
        """The index of the first token, and the tokens."""
        source, is_on_disk = save.source, save.tier is CacheTier.DISK
        if isinstance(source, Snapshot):
            assert isinstance(source.payload, tuple)
            return source.payload
        if source in self._lost or self._fails(save):
            return None
        held = self.tokens(source)
        if is_on_disk or self.limits.kind is SnapshotKind.EXACT:
            assert save.stop == len(held), "all of the slot"
        tokens = tuple(held[save.start : save.stop])
        assert len(tokens) == save.stop - save.start
        return save.start, tokens

    def _load(self, load: Load) -> None:
        cells = self.slots[load.slot]
        assert load.pieces[0].start == len(cells), "a slot has all before"
        if self._fails(load):
            self.slots[load.slot] = []
            self._lost.add(load.slot)
            return
        for piece in load.pieces:
            assert isinstance(piece.payload, tuple)
            first, tokens = piece.payload
            assert piece.start == len(cells), "pieces join"
            if self.limits.kind is SnapshotKind.EXACT:
                assert (piece.start, piece.stop) == (0, len(tokens))
            self.write(load.slot, tokens[piece.start - first : piece.stop - first])
