"""
The memory operations of a plan, on a context.

With unified KV a *range* of positions can be captured alone: it is copied to a scratch
slot, which costs nothing, and that slot is saved. A restore goes the same way back. So
no position is ever held twice. Split KV and memory that cannot be cut are saved whole.

Between the parts of split KV a copy goes through host memory too. libllama's own copy is
only noted and done in the next decode, after operations that must come later.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pyllama_raw.core.snapshot_kind import SnapshotKind
from pyllama_raw.core.step import (
    Capture,
    Captured,
    Copy,
    Operation,
    Release,
    Restore,
    Shift,
    Trim,
)
from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.context import Context

Payload = NDArray[np.uint8]


class SlotOperations:
    """Runs operations in order; a snapshot that fails is missed, never an error."""

    def __init__(self, context: Context, kind: SnapshotKind, scratch: int) -> None:
        """
        Args:
            scratch: a slot of the context that no sequence uses.
        """
        self._context = context
        self._kind = kind
        self._scratch = scratch
        self._shares_cells = context.kv_unified or context.model.is_recurrent
        self._captured: dict[int, Captured] = {}
        self._lost: set[int] = set()
        self.capture_ns = self.restore_ns = 0

    def run(
        self, operations: Iterable[Operation]
    ) -> tuple[dict[int, Captured], frozenset[int]]:
        """Do all; returns what was captured and the slots that could not be filled."""
        self._captured, self._lost = {}, set()
        for operation in operations:
            self._do(operation)
        return self._captured, frozenset(self._lost)

    def _do(self, operation: Operation) -> None:
        context = self._context
        match operation:
            case Release(slot):
                context.seq_rm(slot)
                self._lost.discard(slot)
            case Trim(slot, n_tokens):
                self._trim(slot, n_tokens)
            case Shift(slot, n_keep, n_discard):
                end = n_keep + n_discard
                context.seq_rm(slot, n_keep, end)
                context.seq_add(slot, end, -1, -n_discard)
            case Copy(src, dst, n_tokens):
                self._copy(src, dst, n_tokens)
            case Capture():
                self._capture(operation)
            case Restore():
                self._restore(operation)

    def _trim(self, slot: int, n_tokens: int) -> None:
        if n_tokens == 0:
            self._context.seq_rm(slot)
        elif self._kind is not SnapshotKind.EXACT:
            self._context.seq_rm(slot, n_tokens, -1)

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
            state = np.empty(context.state_bytes(src), np.uint8)
            context.capture(src, state)
            context.restore(dst, state)
        except (SnapshotFailed, MemoryError):
            context.seq_rm(dst)
            self._lost.add(dst)
        else:
            self._trim(dst, n_tokens)

    def _capture(self, capture: Capture) -> None:
        started = time.perf_counter_ns()
        try:
            payload = self._saved(capture)
        except (SnapshotFailed, MemoryError):
            payload = None
        if payload is not None:
            self._captured[capture.capture_id] = Captured(payload, payload.nbytes)
        self.capture_ns += time.perf_counter_ns() - started

    def _saved(self, capture: Capture) -> Payload | None:
        context, slot = self._context, capture.slot
        if self._kind is SnapshotKind.RANGE:
            slot = self._scratch
            context.seq_cp(capture.slot, slot, capture.start, capture.stop)
        try:
            n_bytes = context.state_bytes(slot)
            if n_bytes > capture.max_bytes:
                return None
            payload = np.empty(n_bytes, np.uint8)
            context.capture(slot, payload)
        finally:
            if slot == self._scratch:
                context.seq_rm(slot)
        return payload

    def _restore(self, restore: Restore) -> None:
        started = time.perf_counter_ns()
        try:
            self._fill(restore)
        except SnapshotFailed:
            self._context.seq_rm(restore.slot)
            self._lost.add(restore.slot)
        self.restore_ns += time.perf_counter_ns() - started

    def _fill(self, restore: Restore) -> None:
        context = self._context
        for piece in restore.pieces:
            payload = piece.payload
            assert isinstance(payload, np.ndarray)
            if self._kind is not SnapshotKind.RANGE:
                context.restore(restore.slot, payload)
                self._trim(restore.slot, piece.stop)
                continue
            try:
                context.restore(self._scratch, payload)
                context.seq_cp(self._scratch, restore.slot, piece.start, piece.stop)
            finally:
                context.seq_rm(self._scratch)
