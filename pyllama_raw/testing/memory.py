"""KV memory of a context, on lists: what `FakeExecutor` runs plans on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from pyllama_raw.core.limits import ContextLimits
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.step import (
    Capture,
    Captured,
    Copy,
    Delete,
    Export,
    FileOperation,
    Operation,
    Read,
    Release,
    Restore,
    Shift,
    Trim,
    Write,
)

HEAD_BYTES, TOKEN_BYTES = 4, 10  # of a snapshot here


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
        fails: asked before each capture, restore, write, read and trim; true: it fails.
            A trim that fails is refused, and from the next run() on must not be asked for.
    """

    def __init__(
        self,
        limits: ContextLimits,
        fails: Callable[[Operation], bool] = lambda _: False,
    ) -> None:
        self.limits = limits
        self.slots: list[list[Cell]] = [
            [] for _ in range(limits.n_slots + limits.n_parked)
        ]
        self.shifted: set[int] = set()  # slots whose tokens are no prefix any more
        self._fails = fails
        self.files: set[FakeFile] = set()  # complete ones
        self.writing: list[tuple[int, FakeFile | None]] = []  # until end_write()
        self._numbers = count()
        self.refuses_cuts = False  # has refused one
        self._must_not_cut = limits.kind is SnapshotKind.EXACT
        self._lost: set[int] = set()
        self._captured: dict[int, Captured] = {}

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

    def run(
        self, operations: Iterable[Operation]
    ) -> tuple[dict[int, Captured], frozenset[int]]:
        """Do all in order; what was captured, and the slots that were not restored."""
        self._lost, self._captured = set(), {}
        for operation in operations:
            self._do(operation)
        self._must_not_cut = self._must_not_cut or self.refuses_cuts
        return self._captured, frozenset(self._lost)

    def _do(self, operation: Operation) -> None:
        match operation:
            case Release(slot):
                self.slots[slot] = []
                self.shifted.discard(slot)
                self._lost.discard(slot)
            case Trim():
                self._trim(operation)
            case Shift():
                self._shift(operation)
            case Copy():
                self._copy(operation)
            case Capture():
                self._capture(operation)
            case Restore():
                self._restore(operation)
            case Write() | Export() | Read() | Delete():
                self._do_on_disk(operation)

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

    def _do_on_disk(self, operation: FileOperation) -> None:
        match operation:
            case Write():
                self._write_file(operation)
            case Export(write_id, _, tokens, payload):
                assert isinstance(payload, tuple)
                assert array("i", payload[1]).tobytes() == tokens
                self.writing.append((write_id, FakeFile(write_id, payload[1])))
            case Read():
                self._read_file(operation)
            case Delete(payloads):
                self.files.difference_update(payloads)

    def end_write(self, *, fails: bool = False) -> tuple[int, Captured | None]:
        """Complete the oldest file, or fail; what the scheduler is to be told."""
        write_id, file = self.writing.pop(0)
        if fails or file is None:
            return write_id, None
        self.files.add(file)
        return write_id, Captured(file, file.n_bytes)

    def _write_file(self, write: Write) -> None:
        file = None
        if write.slot not in self._lost and not self._fails(write):
            file = FakeFile(write.write_id, tuple(self.tokens(write.slot)))
            assert array("i", file.tokens).tobytes() == write.tokens, "all of the slot"
            assert file.n_bytes <= write.max_bytes
        self.writing.append((write.write_id, file))

    def _read_file(self, read: Read) -> None:
        file = read.payload
        assert isinstance(file, FakeFile)
        assert not self.slots[read.slot], "files go to empty slots"
        if file not in self.files or self._fails(read):
            self._lost.add(read.slot)
            return
        self.write(read.slot, file.tokens)
        self._check_cut(read.slot, read.n_tokens)
        del self.slots[read.slot][read.n_tokens :]

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

    def _capture(self, capture: Capture) -> None:
        if capture.slot in self._lost or self._fails(capture):
            return
        if self.limits.kind is SnapshotKind.EXACT:
            assert capture.stop == len(self.slots[capture.slot])
        tokens = tuple(self.tokens(capture.slot)[capture.start : capture.stop])
        assert len(tokens) == capture.stop - capture.start
        n_bytes = HEAD_BYTES + TOKEN_BYTES * len(tokens)
        if n_bytes <= capture.max_bytes:
            payload = (capture.start, tokens)
            self._captured[capture.capture_id] = Captured(payload, n_bytes)

    def _restore(self, restore: Restore) -> None:
        cells = self.slots[restore.slot]
        assert not cells, "restores go to empty slots"
        if self._fails(restore):
            self._lost.add(restore.slot)
            return
        for piece in restore.pieces:
            assert isinstance(piece.payload, tuple)
            first, tokens = piece.payload
            assert piece.start == len(cells), "pieces join"
            if self.limits.kind is SnapshotKind.EXACT:
                assert (piece.start, piece.stop) == (0, len(tokens))
            self.write(restore.slot, tokens[piece.start - first : piece.stop - first])
