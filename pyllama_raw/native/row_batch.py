"""Rows of embeddings for one decode, in place of tokens: of images and sounds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyllama_raw.errors import InvalidBatch
from pyllama_raw.native.arrays import FLOAT32, INT32, Array, pointer
from pyllama_raw.native.libllama import ffi, lib

if TYPE_CHECKING:
    from pyllama_raw.native.context import Context, StepOutcome
    from pyllama_raw.native.sampler import RowSamplers


class RowBatch:
    """
    Rows of one or several sequences; no output row among them.

    Args:
        n_embd: width of a row.
        n_sections: positions of a row: 4 with M-RoPE, else 1.

    Thread:
        The one that runs the step.
    """

    def __init__(self, n_embd: int, n_sections: int) -> None:
        self.n_embd, self.n_sections = n_embd, n_sections
        self.n_tokens = self.n_outputs = self.n_rows = 0
        self.rows_ptr = ffi.NULL
        self._rows = array(FLOAT32)
        self._positions = tuple(array(INT32) for _ in range(n_sections))
        self._slots = array(INT32)

    def add(self, rows: Array, positions: Array, slot: int) -> None:
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

    def decode(self, context: Context, *, is_causal: bool) -> None:
        """
        Compute the rows on *context*.

        Args:
            is_causal: if not, all rows of a sequence see each other, in one micro-batch.

        Raises:
            InvalidBatch: more rows than the context computes at once; nothing ran.
            NoKVSpace: memory is unchanged.
            DecodeAborted, DecodeFailed: some micro-batches may be applied.
        """
        with self._attention(context, is_causal=is_causal):
            context.decode(self)

    def step(
        self, context: Context, samplers: RowSamplers, *, is_causal: bool
    ) -> StepOutcome:
        """Like decode(), for an executor: all but InvalidBatch comes back as a code."""
        with self._attention(context, is_causal=is_causal):
            return context.step(self, samplers)

    @contextmanager
    def _attention(self, context: Context, *, is_causal: bool) -> Iterator[None]:
        """Set what rows see, during one decode; a call with more rows would abort."""
        limit = context.n_batch if is_causal else context.n_ubatch
        if not 0 < self.n_tokens <= limit:
            name = "n_batch" if is_causal else "n_ubatch"
            text = f"{self.n_tokens} rows, 1 to {limit} are allowed ({name})"
            raise InvalidBatch("llama_decode", None, text)
        if is_causal:
            yield
            return
        ptr = context.ptr
        lib.llama_set_causal_attn(ptr, False)
        try:
            yield
        finally:
            lib.llama_set_causal_attn(ptr, True)

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
