"""
The moves of a plan, on a context, and its whole memory, copied to host memory and back.

With unified KV a *range* of positions can be saved alone: it is copied to a scratch slot,
which costs nothing, and that slot is saved. A load goes the same way back. So no position
is ever held twice. A recurrent state has no range: each copy takes all of it, so that of the
last range is what a load leaves. Split KV and memory that cannot be cut are saved whole, and so
is what goes to files.

Between the parts of split KV a copy goes through host memory too. libllama's own copy is
only noted and done in the next decode, after operations that must come later.

In a copy of the whole memory, cells that slots share are copied once, and shared again. So
whoever planned what the context holds need not know that another context holds it now.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.step import (
    Copy,
    Delete,
    Fetch,
    FileMove,
    Load,
    Move,
    Piece,
    Release,
    Save,
    Saved,
    Shift,
    Snapshot,
    Trim,
    Written,
)
from pyllama_raw.engine.state_files import (
    ENTRY_BYTES,
    PART_TOKENS,
    DiskWriter,
    FileState,
    State,
    StoredFile,
    head_bytes,
    make_head,
    parts_of,
    to_file,
)
from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import Buffer, check_decode, last_error, new_bytes
from pyllama_raw.native.memory import ALL_SLOTS

Copies = list[tuple[int, Buffer]]  # by slot, or one of all slots


class Done(NamedTuple):
    """Outcome of the moves of a plan."""

    saved: Mapping[int, Saved]  # by save_id, in host memory
    lost: frozenset[int]  # slots that could not be filled or cut, and are empty
    restore_s: Mapping[int, float]  # by slot
    seconds: float  # of all moves


class SlotOperations:
    """
    Does moves in order; a state that cannot be saved or loaded is a miss, no error.

    It outlives the context: `context` may be set to another one.
    """

    def __init__(
        self,
        context: Context,
        kind: SnapshotKind,
        scratch: int,
        disk: DiskWriter | None = None,
    ) -> None:
        """
        Args:
            scratch: a slot of the context that no sequence uses.
            disk: None: plans have no moves of files.
        """
        self.context = context
        self._disk = disk
        self._kind = kind
        self._scratch = scratch
        self._saved: dict[int, Saved] = {}
        self._lost: set[int] = set()
        self._restore_s: dict[int, float] = {}
        self.capture_s = self.restore_s = 0.0  # in all
        self.refuses_cuts = False  # learned from the memory, or known by its kind:
        self.can_cut = kind.can_cut

    def run(self, moves: Iterable[Move], lost: Iterable[int] = ()) -> Done:
        """Do all, in order; the slots *lost* are empty, against what the plan says."""
        started = time.perf_counter()
        self._saved, self._lost = {}, set(lost)
        self._restore_s = {}
        for move in moves:
            self._do(move)
        lost_slots, seconds = frozenset(self._lost), time.perf_counter() - started
        return Done(self._saved, lost_slots, self._restore_s, seconds)

    def note_refusal(self) -> None:
        """The memory has refused to forget a part of a slot; from now on nobody asks it."""
        self.refuses_cuts, self.can_cut = True, False

    def _do(self, move: Move) -> None:
        context = self.context
        match move:
            # The slot is empty, whatever became of it before.
            case Release(slot):
                context.seq_rm(slot)
                self._lost.discard(slot)
            # Forget the end of a slot.
            case Trim(slot, n_pos):
                self._trim(slot, n_pos)
            # Forget a part in the middle, for an output that outgrows its slot.
            case Shift(slot, n_keep, n_discard):
                self._shift(slot, n_keep, n_keep + n_discard)
            # Another slot has the beginning of this prompt.
            case Copy(src, dst, n_pos):
                self._copy(src, dst, n_pos)
            # Capture before somebody else needs the place.
            case Save():
                self._save(move)
            # Host memory or a file has the beginning of this prompt.
            case Load():
                self._load(move)
            # Threads of files do these, and report.
            case Fetch() | Delete():
                self._do_with_files(move)

    def _do_with_files(self, move: FileMove) -> None:
        if isinstance(move, Fetch):
            assert isinstance(move.payload, StoredFile)
            self._files.fetch(move.fetch_id, move.payload)
        else:
            self._files.delete(f for f in move.payloads if isinstance(f, StoredFile))

    @property
    def _files(self) -> DiskWriter:
        assert self._disk is not None
        return self._disk

    def _save(self, save: Save) -> None:
        """To host memory, or from there to the thread that writes files."""
        capture_s = -self.capture_s
        # What goes to a file may be in host memory already.
        if isinstance(save.source, Snapshot):
            state = save.source.payload
            assert isinstance(state, memoryview)
        else:
            state = self._capture(save, save.source)
        capture_s += self.capture_s
        # A save that fails is left out: the scheduler sees that it is not there.
        if not save.tier.is_file:
            if state is not None:
                self._saved[save.save_id] = Saved(state, state.nbytes, capture_s)
        # A file that will not be written is reported like one that could not.
        elif state is None:
            self._files.report(Written(save.save_id, None))
        else:
            assert save.key is not None
            namespace, tokens, spans = save.key
            written = to_file(tokens, spans)
            self._files.write(save.save_id, namespace, written, state, capture_s)

    def _capture(self, save: Save, slot: int) -> State | None:
        """Copy what *slot* holds of the range, by way of scratch if it is a part."""
        started = time.perf_counter()
        context, scratch = self.context, self._scratch
        # A file holds all positions: in parts, where host memory has ranges.
        if save.tier.is_file:
            max_bytes = save.max_bytes - ENTRY_BYTES
            if self._kind is SnapshotKind.RANGE:
                state = self._saved_parts(slot, save.stop, max_bytes)
            else:
                state = self._saved_state(slot, max_bytes)
        # All of the slot at once.
        elif not self._kind.is_part:
            state = self._saved_state(slot, save.max_bytes)
        else:
            # Only the range, by way of scratch: cells are shared, not copied.
            context.seq_cp(slot, scratch, save.start, save.stop)
            state = self._saved_state(scratch, save.max_bytes)
            context.seq_rm(scratch)
        self.capture_s += time.perf_counter() - started
        return state

    def _miss(self, slot: int) -> None:
        self.context.seq_rm(slot)
        self._lost.add(slot)

    def _trim(self, slot: int, n_pos: int) -> None:
        # To empty a slot needs no cut.
        if n_pos == 0:
            self.context.seq_rm(slot)
        elif self._kind.can_cut and not self.context.cut(slot, n_pos):
            self._refuse(slot)

    def _shift(self, slot: int, start: int, end: int) -> None:
        """Forget [start, end), close the gap."""
        if self.context.seq_rm(slot, start, end):
            self.context.seq_add(slot, end, -1, start - end)
        else:
            self.context.seq_rm(slot)
            self._refuse(slot)

    def _refuse(self, slot: int) -> None:
        self._lost.add(slot)
        self.note_refusal()

    def _copy(self, src: int, dst: int, n_pos: int) -> None:
        # What it would be copied from is not there.
        if src in self._lost:
            self._lost.add(dst)
        # Cells are shared, as many as are wanted.
        elif self._kind is SnapshotKind.RANGE:
            self.context.seq_cp(src, dst, 0, n_pos)
        # A state can be copied as a whole only; its end is cut off, if it can be.
        elif self.context.kv_unified or self.context.model.is_recurrent:
            self.context.seq_cp(src, dst)
            self._trim(dst, n_pos)
        else:
            # Split KV: by way of host memory, at once.
            self._copy_state(src, dst, n_pos)

    def _copy_state(self, src: int, dst: int, n_pos: int) -> None:
        context = self.context
        try:
            state = new_bytes(context.state_bytes(src))
            context.capture(src, state)
            context.restore(dst, state)
        except (SnapshotFailed, MemoryError):
            self._miss(dst)
        else:
            self._trim(dst, n_pos)

    def _saved_parts(self, slot: int, n_pos: int, max_bytes: int) -> State | None:
        """All of *slot* in parts; None if that is not possible in *max_bytes*."""
        context, scratch = self.context, self._scratch
        starts = range(0, n_pos, PART_TOKENS)
        ranges = [(start, min(start + PART_TOKENS, n_pos)) for start in starts]
        sizes = []
        try:
            # First the sizes, because the head of a file has them, and the limit counts.
            for start, stop in ranges:
                context.seq_cp(slot, scratch, start, stop)
                n_bytes = 0  # no row has these positions: they are behind an image
                if context.seq_pos_max(scratch) is not None:
                    n_bytes = context.state_bytes(scratch)
                sizes.append((n_bytes, stop - start))
                context.seq_rm(scratch)
            at = head_bytes(len(sizes))
            n_bytes = at + sum(n for n, _ in sizes)
            if n_bytes > max_bytes:
                return None
            payload = new_bytes(n_bytes)
            payload[:at] = make_head(sizes)
            # Then each part, straight into its place.
            for (start, stop), (n, _) in zip(ranges, sizes, strict=True):
                if not n:
                    continue
                context.seq_cp(slot, scratch, start, stop)
                context.capture(scratch, payload[at : at + n])
                context.seq_rm(scratch)
                at += n
        except (SnapshotFailed, MemoryError):
            context.seq_rm(scratch)
            return None
        return payload

    def _saved_state(self, slot: int, max_bytes: int) -> State | None:
        """All of *slot*; None if that is not possible in *max_bytes*."""
        try:
            n_bytes = self.context.state_bytes(slot)
            if n_bytes > max_bytes:
                return None
            payload = new_bytes(n_bytes)
            self.context.capture(slot, payload)
        except (SnapshotFailed, MemoryError):
            return None
        return payload

    def _load(self, load: Load) -> None:
        started = time.perf_counter()
        try:
            for piece in load.pieces:
                self._load_piece(load.slot, piece)
            # A file may have been forged: of fewer tokens than it says.
            highest = self.context.seq_pos_max(load.slot)
            if highest is None or not load.last_pos <= highest < load.pieces[-1].stop:
                self._miss(load.slot)  # a forged file: of fewer tokens than it says
        except (SnapshotFailed, MemoryError):
            self._miss(load.slot)
        finally:
            took_s = time.perf_counter() - started
            self._restore_s[load.slot] = took_s
            self.restore_s += took_s

    def _load_piece(self, slot: int, piece: Piece) -> None:
        payload = piece.payload
        data = payload.data if isinstance(payload, FileState) else payload
        assert isinstance(data, memoryview)
        # A whole state; what goes beyond the piece is cut off.
        if not self._kind.is_part:
            self.context.restore(slot, data)
            self._trim(slot, piece.stop)
        # A file in parts: those that the piece touches.
        elif isinstance(payload, FileState):
            for start, stop, state in parts_of(data):
                if len(state) and start < piece.stop and piece.start < stop:
                    self._load_range(
                        slot, state, max(start, piece.start), min(stop, piece.stop)
                    )
        else:
            self._load_range(slot, data, piece.start, piece.stop)

    def _load_range(self, slot: int, state: State, start: int, stop: int) -> None:
        """Have [start, stop) of *state* in *slot*, by way of scratch."""
        context = self.context
        try:
            context.restore(self._scratch, state)
            context.seq_cp(self._scratch, slot, start, stop)
        finally:
            context.seq_rm(self._scratch)


def captured(context: Context) -> Copies:
    """
    Copies of all that *context* holds.

    Raises:
        SnapshotFailed, MemoryError: there is none, and nothing has changed.
    """
    slots = [
        slot
        for slot in range(context.n_seq_max)
        if context.seq_pos_max(slot) is not None
    ]
    if context.kv_unified or context.model.is_recurrent:  # slots may share cells
        slots = [ALL_SLOTS] if slots else []
    # One copy of all slots, or one each.
    copies: Copies = []
    for slot in slots:
        copy = new_bytes(context.state_bytes(slot))
        context.capture(slot, copy)
        copies.append((slot, copy))
    return copies


def restored(context: Context, copies: object) -> bool:
    """Whether *context*, which is empty, holds what captured() has copied; else it is empty."""
    assert isinstance(copies, list)
    try:
        for slot, copy in copies:
            context.restore(slot, copy)
    except SnapshotFailed:
        context.clear()
        return False
    return True


def warm_up(context: Context) -> bool:
    """
    Compute a micro-batch of a prompt, and a token in each of several slots, for nothing.

    Returns:
        False: what the context held is gone.

    Raises:
        SnapshotFailed, MemoryError: there is no room for a copy of what the context holds.
        NativeError: a decode has failed, and the context is empty.
    """
    # What the context holds is put aside meanwhile.
    copies = captured(context)
    context.clear()
    try:
        # The largest graph of a prompt.
        _compute(context, {0: min(context.n_ubatch, context.n_ctx_seq)})
        context.clear()
        # The graph of a step that only decodes.
        n_sequences = min(context.n_seq_max, context.n_outputs_max, context.max_tokens)
        _compute(context, dict.fromkeys(range(n_sequences), 1))
    finally:
        context.clear()
    return restored(context, copies)


def _compute(context: Context, n_tokens: dict[int, int]) -> None:
    """Decode so many tokens of each slot, and of sources as many as fit; the last has a row."""
    batch = Batch(context.max_tokens)
    token = context.model.vocab.bos or 0
    # A decoder of sources sees only what its encoder has read.
    if context.model.reads_sources:
        n_each = context.n_ubatch // len(n_tokens)
        for slot in n_tokens:
            batch.add_scored([token] * n_each, 0, slot)
        check_decode(context.read_sources(batch).code, last_error())
        batch.clear()
    for slot, n in n_tokens.items():
        batch.add([token] * n, 0, slot, True)
    context.decode(batch)
