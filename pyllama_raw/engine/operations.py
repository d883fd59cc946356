"""
The memory operations of a plan, on a context.

With unified KV a *range* of positions can be captured alone: it is copied to a scratch
slot, which costs nothing, and that slot is saved. A restore goes the same way back. So
no position is ever held twice. Split KV and memory that cannot be cut are saved whole,
and so is what goes to files.

Between the parts of split KV a copy goes through host memory too. libllama's own copy is
only noted and done in the next decode, after operations that must come later.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
from pyllama_raw.engine.disk_writer import DiskWriter
from pyllama_raw.engine.state_file import HEADER_BYTES, State, StoredFile
from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.arrays import new_bytes
from pyllama_raw.native.context import Context


class Done(NamedTuple):
    """What came of the operations of a plan."""

    captured: Mapping[int, Captured]  # by capture_id
    lost: frozenset[int]  # slots that could not be filled or cut, and are empty
    restore_s: Mapping[int, float]  # by slot


@dataclass(slots=True)
class CopyTimes:
    """Where time went; outlives the context."""

    capture_ns: int = 0
    restore_ns: int = 0


class SlotOperations:
    """Runs operations in order; a snapshot that fails is missed, never an error."""

    def __init__(
        self,
        context: Context,
        kind: SnapshotKind,
        scratch: int,
        times: CopyTimes,
        disk: DiskWriter | None = None,
    ) -> None:
        """
        Args:
            scratch: a slot of the context that no sequence uses.
            times: added to.
            disk: None: plans have no operations on files.
        """
        self._context = context
        self._disk = disk
        self._kind = kind
        self._scratch = scratch
        self._shares_cells = context.kv_unified or context.model.is_recurrent
        self._captured: dict[int, Captured] = {}
        self._lost: set[int] = set()
        self._restore_s: dict[int, float] = {}
        self._times = times
        self.refuses_cuts = False  # the memory has refused to forget a part of a slot

    def run(self, operations: Iterable[Operation], lost: Iterable[int] = ()) -> Done:
        """Do all, in order; the slots *lost* are empty, against what the plan says."""
        self._captured, self._lost, self._restore_s = {}, set(lost), {}
        for operation in operations:
            self._do(operation)
        return Done(self._captured, frozenset(self._lost), self._restore_s)

    def _do(self, operation: Operation) -> None:
        context = self._context
        match operation:
            case Release(slot):
                context.seq_rm(slot)
                self._lost.discard(slot)
            case Trim(slot, n_tokens):
                self._trim(slot, n_tokens)
            case Shift(slot, n_keep, n_discard):
                self._shift(slot, n_keep, n_keep + n_discard)
            case Copy(src, dst, n_tokens):
                self._copy(src, dst, n_tokens)
            case Capture():
                self._capture(operation)
            case Restore():
                self._restore(operation)
            case Write() | Export() | Read() | Delete():
                assert self._disk is not None
                self._do_on_disk(operation, self._disk)

    def _do_on_disk(self, operation: FileOperation, disk: DiskWriter) -> None:
        match operation:
            case Write(write_id, slot, namespace, tokens, max_bytes):
                started = time.perf_counter_ns()
                state = self._saved(slot, max_bytes - HEADER_BYTES)
                self._times.capture_ns += time.perf_counter_ns() - started
                if state is None:
                    disk.report(write_id, None)
                else:
                    disk.write(write_id, namespace, tokens, state)
            case Export(write_id, namespace, tokens, payload):
                assert isinstance(payload, memoryview)
                disk.write(write_id, namespace, tokens, payload)
            case Read(slot, payload, n_tokens):
                self._read(slot, payload, n_tokens, disk)
            case Delete(payloads):
                disk.delete(file for file in payloads if isinstance(file, StoredFile))

    def _read(
        self, slot: int, payload: object, n_tokens: int, disk: DiskWriter
    ) -> None:
        started = time.perf_counter_ns()
        assert isinstance(payload, StoredFile)
        try:
            state = disk.read(payload)
            if state is None:
                self._lost.add(slot)
                return
            self._context.restore(slot, state)
            self._trim(slot, n_tokens)
            if self._context.seq_pos_max(slot) != n_tokens - 1:
                self._miss(slot)  # a forged file: a state of fewer tokens than it says
        except (SnapshotFailed, MemoryError):
            self._miss(slot)
        finally:
            self._note_restore(slot, started)

    def _miss(self, slot: int) -> None:
        self._context.seq_rm(slot)
        self._lost.add(slot)

    def _note_restore(self, slot: int, started_ns: int) -> None:
        took_ns = time.perf_counter_ns() - started_ns
        self._times.restore_ns += took_ns
        self._restore_s[slot] = took_ns / 1e9

    def _trim(self, slot: int, n_tokens: int) -> None:
        if n_tokens == 0:
            self._context.seq_rm(slot)
        elif self._kind is SnapshotKind.EXACT or self._context.cut(slot, n_tokens):
            return
        else:
            self._refuse(slot)

    def _shift(self, slot: int, start: int, end: int) -> None:
        """Forget [start, end), close the gap."""
        if self._context.seq_rm(slot, start, end):
            self._context.seq_add(slot, end, -1, start - end)
        else:
            self._context.seq_rm(slot)
            self._refuse(slot)

    def _refuse(self, slot: int) -> None:
        self._lost.add(slot)
        self.refuses_cuts = True

    def _copy(self, src: int, dst: int, n_tokens: int) -> None:
        if src in self._lost:
            self._lost.add(dst)
        elif self._kind is SnapshotKind.RANGE:
            self._context.seq_cp(src, dst, 0, n_tokens)
        elif self._shares_cells:
            self._context.seq_cp(src, dst)
            self._trim(dst, n_tokens)
        else:
            self._copy_state(src, dst, n_tokens)

    def _copy_state(self, src: int, dst: int, n_tokens: int) -> None:
        context = self._context
        try:
            state = new_bytes(context.state_bytes(src))
            context.capture(src, state)
            context.restore(dst, state)
        except (SnapshotFailed, MemoryError):
            context.seq_rm(dst)
            self._lost.add(dst)
        else:
            self._trim(dst, n_tokens)

    def _capture(self, capture: Capture) -> None:
        started = time.perf_counter_ns()
        context, slot, scratch = self._context, capture.slot, self._scratch
        if self._kind is not SnapshotKind.RANGE:
            payload = self._saved(slot, capture.max_bytes)
        else:
            context.seq_cp(slot, scratch, capture.start, capture.stop)
            payload = self._saved(scratch, capture.max_bytes)
            context.seq_rm(scratch)
        if payload is not None:
            self._captured[capture.capture_id] = Captured(payload, payload.nbytes)
        self._times.capture_ns += time.perf_counter_ns() - started

    def _saved(self, slot: int, max_bytes: int) -> State | None:
        """All of *slot*; None if that is not possible in *max_bytes*."""
        try:
            n_bytes = self._context.state_bytes(slot)
            if n_bytes > max_bytes:
                return None
            payload = new_bytes(n_bytes)
            self._context.capture(slot, payload)
        except (SnapshotFailed, MemoryError):
            return None
        return payload

    def _restore(self, restore: Restore) -> None:
        started = time.perf_counter_ns()
        try:
            self._fill(restore)
        except SnapshotFailed:
            self._context.seq_rm(restore.slot)
            self._lost.add(restore.slot)
        finally:
            self._note_restore(restore.slot, started)

    def _fill(self, restore: Restore) -> None:
        context = self._context
        for piece in restore.pieces:
            payload = piece.payload
            assert isinstance(payload, memoryview)
            if self._kind is not SnapshotKind.RANGE:
                context.restore(restore.slot, payload)
                self._trim(restore.slot, piece.stop)
                continue
            try:
                context.restore(self._scratch, payload)
                context.seq_cp(self._scratch, restore.slot, piece.start, piece.stop)
            finally:
                context.seq_rm(self._scratch)
