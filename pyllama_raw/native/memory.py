"""
The KV memory of a context by slot: trim, copy, shift, capture, restore.

libllama asserts on most wrong arguments, which would end the process; each method checks
them first and raises a typed error that names value, limit and knob.
"""

from __future__ import annotations

from typing import Any

from pyllama_raw.errors import InvalidRequest, SnapshotFailed, Unsupported
from pyllama_raw.native import libllama
from pyllama_raw.native.kernels import Kernels
from pyllama_raw.native.libllama import ffi, last_error, lib
from pyllama_raw.native.pointers import UINT8, Buffer, Handle, lent

_POS_MAX = 2**31 - 1
ALL_SLOTS = -1


class SlotMemory(Handle):
    """
    Actions of a context on the memory of its slots; a slot is a llama_seq_id.

    A range is [p0, p1); -1 stands for the start and for the end.

    Thread:
        The one that decodes, and not while it does.
    """

    n_seq_max: int
    kv_unified: bool
    # None: libllama computes everything; else told of all changes
    kernels: Kernels | None

    @property
    def _memory(self) -> Any:
        memory = lib.llama_get_memory(self.ptr)
        if memory == ffi.NULL:
            raise Unsupported("memory", "this model keeps none of its sequences")
        return memory

    @property
    def has_memory(self) -> bool:
        """False for pure encoders: nothing is kept between two calls."""
        return bool(lib.llama_get_memory(self.ptr) != ffi.NULL)

    @property
    def can_shift(self) -> bool:
        """Whether seq_add() is possible."""
        return self.has_memory and bool(lib.llama_memory_can_shift(self._memory))

    def seq_rm(self, slot: int, p0: int = -1, p1: int = -1) -> bool:
        """
        Forget a range of *slot*.

        Returns:
            False if this memory cannot forget a part (recurrent models); all is kept.
        """
        self._check_slot("slot", slot)
        self._check_range(p0, p1)
        is_done = bool(lib.llama_memory_seq_rm(self._memory, slot, p0, p1))
        if is_done and self.kernels is not None:
            self.kernels.removed(slot, p0, p1)
        return is_done

    def cut(self, slot: int, n_kept: int) -> bool:
        """
        Forget all but the first *n_kept* positions of *slot*.

        Returns:
            False if this memory cannot forget a part; the slot is empty then.
        """
        if self.seq_rm(slot, n_kept, -1):
            return True
        # Recurrent memory cannot forget a part, but there may be none behind *n_kept*.
        highest = self.seq_pos_max(slot)
        if highest is None or highest < n_kept:
            return True
        self.seq_rm(slot)
        return False

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """
        Let *dst* have a range of *src* too; free of cost with kv_unified.

        Raises:
            Unsupported: a part of a slot without kv_unified.
        """
        self._check_slot("src", src)
        self._check_slot("dst", dst)
        self._check_range(p0, p1)
        # Slots with cells of their own are copied as a whole, by libllama's assertion.
        if not self.kv_unified and src != dst and (p0 > 0 or p1 >= 0):
            raise Unsupported(
                f"seq_cp of positions {p0} to {p1} of slot {src}",
                "without kv_unified only whole slots can be copied; give "
                "kv_unified=True, or -1 and -1",
            )
        lib.llama_memory_seq_cp(self._memory, src, dst, p0, p1)
        if self.kernels is not None:
            self.kernels.copied(src, dst, p0, p1)

    def seq_add(self, slot: int, p0: int, p1: int, delta: int) -> None:
        """
        Move the positions of a range by *delta*; what falls below 0 is forgotten.

        Raises:
            Unsupported: the memory cannot shift (M-RoPE, some window caches).
        """
        self._check_slot("slot", slot)
        self._check_range(p0, p1)
        if not self.can_shift:
            raise Unsupported(
                "seq_add", "the memory of this model cannot shift positions"
            )
        # A position that passes 32 bits would come out negative.
        highest = self.seq_pos_max(slot) or 0
        if not -_POS_MAX <= delta <= _POS_MAX - highest:
            limit = f"{-_POS_MAX} to {_POS_MAX - highest}"
            raise InvalidRequest("delta", delta, limit)
        lib.llama_memory_seq_add(self._memory, slot, p0, p1, delta)
        if self.kernels is not None:
            self.kernels.moved(slot, p0, p1, delta)

    def seq_pos_max(self, slot: int) -> int | None:
        """The highest position kept for *slot*, None if it is empty."""
        self._check_slot("slot", slot)
        pos = int(lib.llama_memory_seq_pos_max(self._memory, slot))
        return None if pos < 0 else pos

    def clear(self) -> None:
        """Forget all slots."""
        lib.llama_memory_clear(self._memory, False)
        if self.kernels is not None:
            self.kernels.cleared()

    def state_bytes(self, slot: int) -> int:
        """
        Bytes capture() would write now.

        Args:
            slot: ALL_SLOTS: of the whole memory, in which slots share cells as they do now.

        Thread:
            Waits for running computations.
        """
        self._check_state(slot)
        n_bytes = ffi.new("size_t *")
        code = lib.plr_state_seq_size(self.ptr, slot, n_bytes)
        self._check_copied("llama_state_seq_get_size_ext", code, n_bytes[0])
        return int(n_bytes[0])

    def capture(self, slot: int, out: Buffer) -> int:
        """
        Copy the memory of *slot* into *out*; the slot keeps it.

        Args:
            out: uint8, 1-D, C-contiguous, at least state_bytes(slot) long.

        Returns:
            Bytes written.

        Raises:
            SnapshotFailed: the slot is empty, or *out* too small.
        """
        self._check_state(slot)
        n_bytes = ffi.new("size_t *")
        with lent(out, UINT8, writable=True) as dst:
            # An empty slot has no state that anybody could restore.
            if slot != ALL_SLOTS and self.seq_pos_max(slot) is None:
                message = f"slot {slot} is empty"
                raise SnapshotFailed("llama_state_seq_get_data_ext", 0, message)
            code = lib.plr_state_seq_get(self.ptr, dst, len(out), slot, n_bytes)
        self._check_copied("llama_state_seq_get_data_ext", code, n_bytes[0])
        return int(n_bytes[0])

    def restore(self, slot: int, data: Buffer) -> int:
        """
        Replace the memory of *slot* by what capture() wrote.

        Args:
            data: of a context of the same model, layout, KV types and flash attention.

        Returns:
            Bytes read.

        Raises:
            SnapshotFailed: it does not fit, or too few cells are free; the slot is empty.
        """
        self._check_state(slot)
        n_bytes = ffi.new("size_t *")
        with lent(data, UINT8) as src:
            code = lib.plr_state_seq_set(self.ptr, src, len(data), slot, n_bytes)
            is_done = code == 0 and n_bytes[0] > 0
            # A state that did not fit leaves parts behind: the slot is emptied.
            if not is_done and slot == ALL_SLOTS:
                lib.llama_memory_clear(self._memory, False)
            elif not is_done:
                lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
            # Our kernels read the cells out of the state, or take them as they lie.
            if self.kernels is not None:
                self.kernels.restored(slot, src, len(data) if is_done else 0)
        self._check_copied("llama_state_seq_set_data_ext", code, n_bytes[0])
        return int(n_bytes[0])

    def _check_slot(self, name: str, slot: int) -> None:
        if not 0 <= slot < self.n_seq_max:
            raise InvalidRequest(name, slot, f"0 to {self.n_seq_max - 1} (n_seq_max)")

    def _check_range(self, p0: int, p1: int) -> None:
        if not (-1 <= p0 <= _POS_MAX and -1 <= p1 <= _POS_MAX):
            raise InvalidRequest("p0, p1", (p0, p1), f"-1 to {_POS_MAX}")

    def _check_state(self, slot: int) -> None:
        if slot != ALL_SLOTS:
            self._check_slot("slot", slot)
        if not self.has_memory:
            raise Unsupported("memory", "this model keeps none of its sequences")

    def _check_copied(self, function: str, code: int, n_bytes: int) -> None:
        if code != 0:
            raise SnapshotFailed(function, code, last_error())
        if n_bytes == 0:
            raise SnapshotFailed(
                function, 0, libllama.last_errors(limit=2) or "no copy"
            )
