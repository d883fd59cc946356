"""KV memory of a context, on lists: what `FakeExecutor` runs plans on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

from pyllama_raw.core.memory.limits import ContextLimits
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.spans import Spans
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

Payload = tuple[tuple[int, int], ...]  # (position, token) of each row


class Cell(NamedTuple):
    """One row of a slot; copies share cells, as unified KV does."""

    number: int
    token: int
    pos: int


class FakeFile(NamedTuple):
    """The file that a write leaves."""

    number: int
    rows: Payload

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for _, token in self.rows)

    @property
    def n_bytes(self) -> int:
        return HEAD_BYTES + TOKEN_BYTES * len(self.rows)


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

    def write(self, slot: int, tokens: Iterable[int], pos: int | None = None) -> None:
        """
        Fill new cells.

        Args:
            pos: of the first token; None: the next one. Tokens below 0 stand for rows of a
                span, which all have the position of the first one.
        """
        pos = self._highest(slot) + 1 if pos is None else pos
        rows = ((pos + i if t >= 0 else pos, t) for i, t in enumerate(tokens))
        self._fill(slot, rows)

    def _fill(self, slot: int, rows: Iterable[tuple[int, int]]) -> None:
        cells = self.slots[slot]
        for pos, token in rows:
            assert _end_at(cells, pos) or (token < 0 and pos == cells[-1].pos)
            cells.append(Cell(next(self._numbers), token, pos))
        assert len(cells) <= self.limits.n_ctx_slot

    def _highest(self, slot: int) -> int:
        """The position of the last row, as seq_pos_max says; -1: there is none."""
        return self.slots[slot][-1].pos if self.slots[slot] else -1

    def _first(self, slot: int, n_pos: int) -> list[Cell]:
        """Cells of the first *n_pos* positions."""
        return [cell for cell in self.slots[slot] if cell.pos < n_pos]

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
        slot, n_pos = trim
        kept = self._first(slot, n_pos)
        assert _end_at(kept, n_pos) or slot in self._lost
        self._check_cut(slot, kept)
        if 0 < len(kept) < len(self.slots[slot]) and self._fails(trim):
            kept = []
            self._lost.add(slot)
            self.refuses_cuts = True
        self.slots[slot] = kept

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
        if fails or file is None:
            return Fetched(fetch_id, None, 0.0)
        return Fetched(fetch_id, file.rows, 0.0)

    def _check_cut(self, slot: int, kept: list[Cell]) -> None:
        if self._must_not_cut:
            assert kept in ([], self.slots[slot]), "this memory cannot be cut"

    def _shift(self, shift: Shift) -> None:
        assert self.limits.can_shift
        cells = self.slots[shift.slot]
        mine = {cell.number for cell in cells}
        for slot, others in enumerate(self.slots):
            shared = mine & {cell.number for cell in others}
            assert slot == shift.slot or not shared, "shared cells keep their position"
        assert [cell.pos for cell in cells] == list(range(len(cells)))
        assert shift.n_keep + shift.n_discard <= len(cells)
        del cells[shift.n_keep : shift.n_keep + shift.n_discard]
        moved = enumerate(cells)
        self.slots[shift.slot] = [cell._replace(pos=pos) for pos, cell in moved]
        self.shifted.add(shift.slot)

    def _copy(self, copy: Copy) -> None:
        assert not self.slots[copy.dst], "copies go to empty slots"
        assert copy.src not in self.shifted
        if copy.src in self._lost:
            self._lost.add(copy.dst)
            return
        cells = self._first(copy.src, copy.n_pos)
        assert _end_at(cells, copy.n_pos)
        self._check_cut(copy.src, cells)
        if self.limits.unified:
            self.slots[copy.dst] = cells
        else:
            self._fill(copy.dst, _rows(cells))

    def _save(self, save: Save) -> None:
        payload = self._payload(save)
        if save.tier is CacheTier.DISK:
            file = None
            if payload is not None:
                file = FakeFile(save.save_id, payload)
                assert save.key is not None
                assert array("i", file.tokens).tobytes() == save.key.tokens
                assert_keyed(file.tokens, save.key.spans)
                assert file.n_bytes <= save.max_bytes
            self.writing.append((save.save_id, file))
        elif payload is not None:
            n_bytes = HEAD_BYTES + TOKEN_BYTES * len(payload)
            if n_bytes <= save.max_bytes:
                self._saved[save.save_id] = Saved(payload, n_bytes)

    def _payload(self, save: Save) -> Payload | None:
        """The rows that are to be saved; None: the save fails."""
        source, is_on_disk = save.source, save.tier is CacheTier.DISK
        if isinstance(source, Snapshot):
            assert isinstance(source.payload, tuple)
            return source.payload
        if source in self._lost or self._fails(save):
            return None
        held = self.slots[source]
        cells = [cell for cell in held if save.start <= cell.pos < save.stop]
        assert cells[0].pos == save.start
        assert _end_at(cells, save.stop)
        if is_on_disk or self.limits.kind is SnapshotKind.EXACT:
            assert cells == held, "all of the slot"
        return _rows(cells)

    def _load(self, load: Load) -> None:
        slot = load.slot
        if self._fails(load):
            self.slots[slot] = []
            self._lost.add(slot)
            return
        for piece in load.pieces:
            assert isinstance(piece.payload, tuple)
            assert _end_at(self.slots[slot], piece.start), "a slot has all before"
            rows = [row for row in piece.payload if piece.start <= row[0] < piece.stop]
            if self.limits.kind is SnapshotKind.EXACT:
                assert rows == list(piece.payload)
            self._fill(slot, rows)
            assert _end_at(self.slots[slot], piece.stop)
        assert self._highest(slot) == load.last_pos


def assert_keyed(tokens: Sequence[int], spans: Spans) -> None:
    """Other engines know rows by keys, so each span has one and is whole."""
    assert all(span.key for span in spans)
    rows = [index for span in spans for index in range(span.start, span.stop)]
    assert rows == [index for index, token in enumerate(tokens) if token < 0]


def _rows(cells: Iterable[Cell]) -> Payload:
    return tuple((cell.pos, cell.token) for cell in cells)


def _end_at(cells: list[Cell], pos: int) -> bool:
    """Whether *pos* comes after *cells*, as far as these tell: a span has room behind it."""
    if not cells:
        return pos == 0
    last = cells[-1]
    return pos == last.pos + 1 or (last.token < 0 and pos > last.pos)
