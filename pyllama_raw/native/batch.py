"""
The batch of a step: tokens of many sequences, or rows of embeddings of images and sounds.

The batch of tokens is preallocated and filled by slices, never by a loop over tokens. Its memory
is arrays of the standard library: a handful of rows, which is what most steps have, costs numpy
more time than it takes to write them.

libllama checks token ids, sequences and positions itself and answers -1; only what it
would abort on, or what would be another number in C, is checked here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pyllama_raw.errors import InvalidBatch
from pyllama_raw.native.libllama import FLOAT32, INT32, Array, Buffer, ffi, lib, pointer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Tokens: TypeAlias = "array[int] | Sequence[int] | NDArray[np.int32]"

_INT32_MAX = 2**31 - 1


class Batch:
    """
    Tokens of many sequences, up to *capacity*.

    rows[i] is the place of the i-th output row that is to be sampled, of n_rows. With has_drafts
    some of these have tokens that are drafts of what the row before gives.

    Thread:
        The one that runs the step.
    """

    is_causal = True  # a token sees those before it only

    def __init__(self, capacity: int) -> None:
        if not 0 < capacity <= _INT32_MAX:
            raise InvalidBatch("llama_batch", None, f"capacity={capacity} must be > 0")
        self.capacity = capacity
        self.n_tokens = 0
        self.n_outputs = 0
        self.n_rows = 0
        self.has_drafts = False
        self.rows = array("i", bytes(4 * capacity))
        self._token = array("i", bytes(4 * capacity))
        self._pos = array("i", bytes(4 * capacity))
        self._logits = bytearray(capacity)  # 1: compute an output row
        self._n_seq_id = array("i", [1]) * capacity
        # libllama takes a list of sequences for each token. All are of length 1, so each is an
        # address into _ids, which has every number once.
        self._seq_id = array("Q", bytes(8 * (capacity + 1)))
        self._n_ids = int(lib.llama_max_parallel_sequences())
        self._ids = array("i", range(self._n_ids))
        first = self._ids.buffer_info()[0]
        self._address = array("Q", range(first, first + 4 * self._n_ids, 4))
        self._raw = self._make_struct()
        self.rows_ptr = ffi.from_buffer("int32_t[]", self.rows)
        self._drafts = bytearray(capacity)  # 1: the token of the row is one
        self._drafts_c = ffi.from_buffer("int8_t[]", self._drafts)
        self.drafts_ptr = (
            ffi.NULL
        )  # one number for each of n_rows, if any is of a draft

    def _make_struct(self) -> Any:
        raw = ffi.new("struct llama_batch *")
        # Arrays whose buffer is held cannot move.
        self._c_memory = tuple(
            ffi.from_buffer(values)
            for values in (
                self._token,
                self._pos,
                self._n_seq_id,
                self._seq_id,
                self._logits,
            )
        )
        token, pos, n_seq_id, seq_id, logits = self._c_memory
        raw.token = ffi.cast("llama_token *", token)
        raw.embd = ffi.NULL
        raw.pos = ffi.cast("llama_pos *", pos)
        raw.n_seq_id = ffi.cast("int32_t *", n_seq_id)
        raw.seq_id = ffi.cast("llama_seq_id **", seq_id)
        raw.logits = ffi.cast("int8_t *", logits)
        return raw

    @property
    def raw(self) -> Any:
        """llama_batch *, valid as long as this object."""
        self._raw.n_tokens = self.n_tokens
        return self._raw

    @property
    def is_rows_only(self) -> bool:
        """Whether every token is sampled from, whatever is."""
        return self.n_rows == self.n_tokens and not self.has_drafts

    def keep_rows(self) -> None:
        """The step has replaced the batch by the next token of each row: count those."""
        if not self.is_rows_only:
            n_rows = self.n_tokens = self.n_outputs = self.n_rows
            self.rows[:n_rows] = array("i", range(n_rows))

    def clear(self) -> None:
        """Forget all tokens."""
        if self.has_drafts:
            self._drafts[: self.n_rows] = bytes(self.n_rows)
            self.has_drafts, self.drafts_ptr = False, ffi.NULL
        self.n_tokens = self.n_outputs = self.n_rows = 0

    def add(self, tokens: Tokens, pos: int, seq_id: int, output: bool) -> None:
        """
        Append a run of one sequence.

        Args:
            pos: of tokens[0]; the others follow.
            output: compute the output row of the last token, to be sampled.

        Raises:
            InvalidBatch: no room, or a number is out of range; nothing was added.
        """
        # All is checked before anything is written.
        start = self.n_tokens
        count = len(tokens)
        end = start + count
        if (
            end > self.capacity
            or not 0 <= seq_id < self._n_ids
            or not 0 <= pos <= _INT32_MAX - count
        ):
            raise self._refusal(count, [pos], [seq_id])
        if not count:
            return
        self._token[start:end] = _ints(tokens)
        self._pos[start:end] = array("i", range(pos, pos + count))
        self._seq_id[start:end] = self._address[seq_id : seq_id + 1] * count
        self._logits[start:end] = bytes(count)
        self.n_tokens = end
        # Only the last token of a run is sampled.
        if output:
            self._logits[end - 1] = 1
            self.n_outputs += 1
            self.rows[self.n_rows] = end - 1
            self.n_rows += 1

    def add_scored(
        self, tokens: Tokens, pos: int, seq_id: int, output: bool = False
    ) -> None:
        """Like add(), with an output row for every token."""
        # add() counts one output row at most; here each token has one.
        start, n_before = self.n_tokens, self.n_outputs
        self.add(tokens, pos, seq_id, output)
        count = self.n_tokens - start
        self._logits[start : self.n_tokens] = b"\1" * count
        self.n_outputs = n_before + count

    def add_drafts(self, tokens: Tokens, pos: int, seq_id: int) -> None:
        """Like add_scored(), to be sampled all: tokens but the first are drafts."""
        start, row = self.n_tokens, self.n_rows
        self.add_scored(tokens, pos, seq_id)
        count = self.n_tokens - start
        self.rows[row : row + count] = array("i", range(start, start + count))
        self._drafts[row + 1 : row + count] = b"\1" * (count - 1)
        self.n_rows = row + count
        self.has_drafts, self.drafts_ptr = True, self._drafts_c

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
        # Slices and comprehensions only: this runs once a step for all streams.
        address = self._address
        self._token[start:end] = _ints(tokens)
        self._pos[start:end] = array("i", pos)
        self._seq_id[start:end] = array("Q", [address[i] for i in seq_ids])
        self._logits[start:end] = b"\1" * count
        n_rows = self.n_rows
        self.rows[n_rows : n_rows + count] = array("i", range(start, end))
        self.n_rows += count
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


def _ints(tokens: Tokens) -> array[int]:
    """*tokens* as C ints; a number that is none becomes one that libllama refuses."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    try:
        return array("i", tokens)
    except OverflowError:
        # -1 is no token of any model.
        return array("i", [t if -1 <= t <= _INT32_MAX else -1 for t in tokens])


class HiddenBatch(Batch):
    """Tokens, each with the hidden state of the one before it: the input of heads of a model."""

    def __init__(self, capacity: int, width: int) -> None:
        """
        Args:
            width: floats of a hidden state.
        """
        super().__init__(capacity)
        self._hidden = bytearray(4 * width * capacity)
        self._hidden_bytes = 4 * width
        self._hidden_c = ffi.from_buffer("float[]", self._hidden)
        self._raw.embd = ffi.cast("float *", self._hidden_c)

    def add_hidden(
        self,
        tokens: Tokens,
        pos: int,
        seq_id: int,
        hidden: bytes | bytearray | memoryview,
        output: bool,
    ) -> None:
        """
        Append a run of one sequence, as add() does.

        Args:
            hidden: of each token the state of the one before it, one behind the other.

        Raises:
            InvalidBatch: no room, another length, or a number is out of range; nothing was added.
        """
        size, start = self._hidden_bytes, self.n_tokens
        if len(hidden) != len(tokens) * size:
            text = f"{len(tokens)} tokens, {len(hidden)} bytes of hidden states"
            raise InvalidBatch("llama_batch", None, text)
        self.add(tokens, pos, seq_id, output)
        self._hidden[start * size : self.n_tokens * size] = hidden


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
        self.rows_ptr = self.drafts_ptr = ffi.NULL
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
        # Whole rows, each with a position in every section.
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
        # libllama wants sections one behind the other; each add() brings a part of all.
        n_rows = self.n_tokens
        positions = array(INT32)
        for section in self._positions:
            positions += section
        counts = array(INT32, [1]) * n_rows
        slots = ffi.from_buffer("llama_seq_id[]", self._slots)
        seq_ids = ffi.new("llama_seq_id *[]", [slots + i for i in range(n_rows)])
        outputs = ffi.new("int8_t[]", n_rows)
        self._c_memory = positions, counts, slots, seq_ids, outputs  # C reads them
        raw = ffi.new("struct llama_batch *")
        raw.n_tokens, raw.seq_id, raw.logits = n_rows, seq_ids, outputs
        raw.embd = pointer(self._rows, FLOAT32)
        raw.pos, raw.n_seq_id = pointer(positions, INT32), pointer(counts, INT32)
        return raw
