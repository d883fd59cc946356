"""
The one batch of a step: preallocated, filled by slices, never by a loop over tokens.

libllama checks token ids, sequences and positions itself and answers -1; only what it
would abort on, or what numpy would wrap silently, is checked here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pyllama_raw.errors import InvalidBatch
from pyllama_raw.native.libllama import ffi, lib

Tokens: TypeAlias = "array[int] | Sequence[int] | NDArray[np.int32]"

_INT32_MAX = 2**31 - 1


class Batch:
    """
    Tokens of many sequences, up to *capacity*, in the memory of numpy arrays.

    Thread:
        The one that runs the step.
    """

    def __init__(self, capacity: int) -> None:
        if not 0 < capacity <= _INT32_MAX:
            raise InvalidBatch("llama_batch", None, f"capacity={capacity} must be > 0")
        self.capacity = capacity
        self.n_tokens = 0
        self.n_outputs = 0
        self.token = np.zeros(capacity, np.int32)
        self.pos = np.zeros(capacity, np.int32)
        self.logits = np.zeros(capacity, np.int8)  # 1: compute an output row
        self.n_seq_id = np.ones(capacity, np.int32)
        self.seq_id = np.zeros(capacity + 1, np.uintp)  # addresses into _ids
        self._offsets = np.arange(capacity, dtype=np.int32)
        self._ids = np.arange(lib.llama_max_parallel_sequences(), dtype=np.int32)
        self._n_ids = len(self._ids)
        first = self._ids.ctypes.data
        self._address = [first + 4 * i for i in range(self._n_ids)]
        self._raw = self._make_struct()

    def _make_struct(self) -> Any:
        raw = ffi.new("struct llama_batch *")
        raw.token = ffi.cast("llama_token *", self.token.ctypes.data)
        raw.embd = ffi.NULL
        raw.pos = ffi.cast("llama_pos *", self.pos.ctypes.data)
        raw.n_seq_id = ffi.cast("int32_t *", self.n_seq_id.ctypes.data)
        raw.seq_id = ffi.cast("llama_seq_id **", self.seq_id.ctypes.data)
        raw.logits = ffi.cast("int8_t *", self.logits.ctypes.data)
        return raw

    @property
    def raw(self) -> Any:
        """llama_batch *, valid as long as this object."""
        self._raw.n_tokens = self.n_tokens
        return self._raw

    def clear(self) -> None:
        """Forget all tokens."""
        self.n_tokens = self.n_outputs = 0

    def add(self, tokens: Tokens, pos: int, seq_id: int, output: bool) -> None:
        """
        Append a run of one sequence.

        Args:
            pos: of tokens[0]; the others follow.
            output: compute the output row of the last token.

        Raises:
            InvalidBatch: no room, or a number is out of range; nothing was added.
        """
        start = self.n_tokens
        count = len(tokens)
        end = start + count
        if (
            end > self.capacity
            or not 0 <= seq_id < self._n_ids
            or not 0 <= pos <= _INT32_MAX - count
        ):
            raise self._refusal(count, [pos], [seq_id])
        self.token[start:end] = tokens
        np.add(self._offsets[:count], pos, out=self.pos[start:end])
        self.seq_id[start:end] = self._address[seq_id]
        self.logits[start:end] = 0
        if output and count:
            self.logits[end - 1] = 1
            self.n_outputs += 1
        self.n_tokens = end

    def add_scored(self, tokens: Tokens, pos: int, seq_id: int) -> None:
        """Like add(), with an output row for every token."""
        start = self.n_tokens
        self.add(tokens, pos, seq_id, output=False)
        self.logits[start : self.n_tokens] = 1
        self.n_outputs += self.n_tokens - start

    def add_rows(self, tokens: list[int], pos: list[int], seq_ids: list[int]) -> None:
        """Append one token for each of many sequences, each with an output row."""
        start = self.n_tokens
        count = len(tokens)
        if not count:
            return
        end = start + count
        if (
            end > self.capacity
            or not len(pos) == len(seq_ids) == count
            or min(seq_ids) < 0
            or max(seq_ids) >= self._n_ids
            or min(pos) < 0
            or max(pos) >= _INT32_MAX
        ):
            raise self._refusal(count, pos, seq_ids)
        self.token[start:end] = tokens
        self.pos[start:end] = pos
        address = self._address
        self.seq_id[start:end] = [address[i] for i in seq_ids]
        self.logits[start:end] = 1
        self.n_outputs += count
        self.n_tokens = end

    def _refusal(self, count: int, pos: list[int], seq_ids: list[int]) -> InvalidBatch:
        if self.n_tokens + count > self.capacity:
            text = f"{self.n_tokens} + {count} tokens, the capacity is {self.capacity}"
        elif len(pos) != len(seq_ids):
            text = f"{count} tokens, {len(pos)} positions, {len(seq_ids)} sequences"
        else:
            text = (
                f"seq_id {min(seq_ids)} to {max(seq_ids)}, pos {min(pos)} to {max(pos)}: "
                f"seq_id must be 0 to {self._n_ids - 1}, pos 0 to {_INT32_MAX}"
            )
        return InvalidBatch("llama_batch", None, text)
