"""Rows of embeddings for one decode, in place of tokens: of images and sounds."""

from __future__ import annotations

from array import array
from typing import Any

from pyllama_raw.errors import InvalidBatch
from pyllama_raw.native.arrays import FLOAT32, INT32, Array, Buffer, pointer
from pyllama_raw.native.libllama import ffi, lib


class RowBatch:
    """
    Rows of one or several sequences; no output row among them.

    Args:
        n_embd: width of a row.
        n_sections: positions of a row: 4 with M-RoPE, else 1.
        is_causal: if not, all rows of a sequence see each other, in one micro-batch.

    Thread:
        The one that runs the step.
    """

    def __init__(self, n_embd: int, n_sections: int, *, is_causal: bool = True) -> None:
        self.n_embd, self.n_sections, self.is_causal = n_embd, n_sections, is_causal
        self.n_tokens = self.n_outputs = self.n_rows = 0
        self.rows_ptr = ffi.NULL
        self._rows = array(FLOAT32)
        self._positions = tuple(array(INT32) for _ in range(n_sections))
        self._slots = array(INT32)

    def add(self, rows: Buffer, positions: Array, slot: int) -> None:
        """
        Append rows of *slot*.

        Args:
            rows: float32, n x n_embd.
            positions: int32, n of each section, section by section.

        Raises:
            InvalidBatch: the lengths do not fit; nothing was added.
        """
        n_rows, left = divmod(len(rows), self.n_embd)
        if left or not n_rows or len(positions) != n_rows * self.n_sections:
            text = f"{len(rows)} values, {len(positions)} positions"
            raise InvalidBatch("llama_batch", None, text)
        if not 0 <= slot < lib.llama_max_parallel_sequences():
            raise InvalidBatch("llama_batch", None, f"seq_id {slot}")
        self._rows.frombytes(memoryview(rows).cast("B"))  # type: ignore[arg-type]
        for index, section in enumerate(self._positions):
            part = positions[index * n_rows : (index + 1) * n_rows]
            section.frombytes(memoryview(part).cast("B"))  # type: ignore[arg-type]
        self._slots.extend([slot] * n_rows)
        self.n_tokens += n_rows

    @property
    def raw(self) -> Any:
        """llama_batch *, valid until the next one is asked for."""
        n_rows = self.n_tokens
        positions = array(INT32)
        for section in self._positions:
            positions += section
        counts = array(INT32, [1]) * n_rows
        slots = ffi.from_buffer("llama_seq_id[]", self._slots)
        seq_ids = ffi.new("llama_seq_id *[]", [slots + i for i in range(n_rows)])
        outputs = ffi.new("int8_t[]", n_rows)
        self._held = positions, counts, slots, seq_ids, outputs  # C reads them
        raw = ffi.new("struct llama_batch *")
        raw.n_tokens, raw.seq_id, raw.logits = n_rows, seq_ids, outputs
        raw.embd = pointer(self._rows, FLOAT32)
        raw.pos, raw.n_seq_id = pointer(positions, INT32), pointer(counts, INT32)
        return raw
