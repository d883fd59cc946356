"""KV memory of a context, on lists: what `FakeExecutor` runs plans on."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
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


class Columns(NamedTuple):
    """The rows of a slot; copies share cells, as unified KV does."""

    cells: list[int]  # their numbers
    tokens: list[int]
    positions: list[int]  # never falling

    def part(self, start: int, stop: int) -> Columns:
        """Rows of the positions [start, stop)."""
        first, end = (bisect_left(self.positions, pos) for pos in (start, stop))
        return Columns(*(column[first:end] for column in self))

    @property
    def payload(self) -> Payload:
        return tuple(zip(self.positions, self.tokens, strict=True))

    def end_at(self, pos: int) -> bool:
        """Whether *pos* comes next, as far as rows tell: a span has room behind it."""
        if not self.tokens:
            return pos == 0
        last = self.positions[-1]
        return pos == last + 1 or (self.tokens[-1] < 0 and pos > last)


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
        n_slots = limits.n_slots + limits.n_parked
        self.slots = [Columns([], [], []) for _ in range(n_slots)]
        self._n_users = Counter[int]()  # slots that have a cell
        self.shifted: set[int] = set()  # slots whose tokens are no prefix any more
        self._fails = fails
        self.files: set[FakeFile] = set()  # complete ones
        self.writing: list[tuple[int, FakeFile | None]] = []  # until end_write()
        self.reading: list[tuple[int, FakeFile | None]] = []  # until end_fetch()
        self._numbers = count()
        self.refuses_cuts = False  # has refused one
        self._must_not_cut = not limits.kind.can_cut
        self._lost: set[int] = set()
        self._saved: dict[int, Saved] = {}

    @property
    def n_used(self) -> int:
        """Distinct cells."""
        return len(self._n_users)

    def tokens(self, slot: int) -> list[int]:
        """Tokens of a slot; the list grows with it."""
        return self.slots[slot].tokens

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
        columns = self.slots[slot]
        for pos, token in rows:
            assert columns.end_at(pos) or (token < 0 and pos == columns.positions[-1])
            number = next(self._numbers)
            columns.cells.append(number)
            columns.tokens.append(token)
            columns.positions.append(pos)
            self._n_users[number] = 1
        assert len(columns.cells) <= self.limits.n_ctx_slot

    def _put(self, slot: int, rows: Columns) -> None:
        """Have a slot hold *rows* instead of what it holds."""
        self._n_users.update(rows.cells)
        for number in self.slots[slot].cells:
            self._n_users[number] -= 1
            if not self._n_users[number]:
                del self._n_users[number]
        self.slots[slot] = rows

    def _highest(self, slot: int) -> int:
        """The position of the last row, as seq_pos_max says; -1: there is none."""
        return max(self.slots[slot].positions[-1:], default=-1)

    def empty(self, slot: int) -> None:
        """Forget all of a slot."""
        self._put(slot, Columns([], [], []))
        self.shifted.discard(slot)

    def clear(self) -> None:
        for slot in range(len(self.slots)):
            self.empty(slot)

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
                self.empty(slot)
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
        columns = self.slots[slot]
        head = columns.part(0, n_pos)
        assert head.end_at(n_pos) or slot in self._lost
        self._check_cut(slot, head)
        if 0 < len(head.cells) < len(columns.cells) and self._fails(trim):
            head = Columns([], [], [])
            self._lost.add(slot)
            self.refuses_cuts = True
        self._put(slot, head)

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

    def _check_cut(self, slot: int, head: Columns) -> None:
        if self._must_not_cut:
            assert not head.cells or head == self.slots[slot], (
                "this memory cannot be cut"
            )

    def _shift(self, shift: Shift) -> None:
        assert self.limits.can_shift
        columns = self.slots[shift.slot]
        is_own = all(self._n_users[number] == 1 for number in columns.cells)
        assert is_own, "shared cells keep their position"
        assert columns.positions == list(range(len(columns.cells)))
        end = shift.n_keep + shift.n_discard
        assert end <= len(columns.cells)
        cells, tokens, _ = (c[: shift.n_keep] + c[end:] for c in columns)
        self._put(shift.slot, Columns(cells, tokens, list(range(len(cells)))))
        self.shifted.add(shift.slot)

    def _copy(self, copy: Copy) -> None:
        assert not self.slots[copy.dst].cells, "copies go to empty slots"
        assert copy.src not in self.shifted
        if copy.src in self._lost:
            self._lost.add(copy.dst)
            return
        rows = self.slots[copy.src].part(0, copy.n_pos)
        assert rows.end_at(copy.n_pos)
        self._check_cut(copy.src, rows)
        if self.limits.unified:
            self._put(copy.dst, rows)
        else:
            self._fill(copy.dst, rows.payload)

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
        columns = self.slots[source]
        rows = columns.part(save.start, save.stop)
        assert rows.positions[0] == save.start
        assert rows.end_at(save.stop)
        if is_on_disk or self.limits.kind is SnapshotKind.EXACT:
            assert rows == columns, "all of the slot"
        elif not self.limits.kind.can_cut:
            assert rows.cells[-1] == columns.cells[-1], (
                "what holds at the end of the slot"
            )
        return rows.payload

    def _load(self, load: Load) -> None:
        slot = load.slot
        if self._fails(load):
            self._put(slot, Columns([], [], []))
            self._lost.add(slot)
            return
        for piece in load.pieces:
            assert isinstance(piece.payload, tuple)
            assert self.slots[slot].end_at(piece.start), "a slot has all before"
            rows = [row for row in piece.payload if piece.start <= row[0] < piece.stop]
            if not self.limits.kind.can_cut:
                assert rows == list(piece.payload)
            self._fill(slot, rows)
            assert self.slots[slot].end_at(piece.stop)
        assert self._highest(slot) == load.last_pos


def assert_keyed(tokens: Sequence[int], spans: Spans) -> None:
    """Other engines know rows by keys, so each span has one and is whole."""
    assert all(span.key for span in spans)
    rows = [index for span in spans for index in range(span.start, span.stop)]
    assert rows == [index for index, token in enumerate(tokens) if token < 0]
