"""
The KV memory of a context: what it will need, and what is done to it by slot.

Linux grants more than there is and kills the process when it is used; so a size that cannot fit is
refused before libllama asks for it. The bound is a lower one: it never refuses what fits. libllama
tells what a context needs by device, without a weight being read. A model that was loaded with
no_alloc has the shapes of its weights and no data. Of a context on it libllama reckons all buffers,
and allocates those of recurrent states only. Nothing may be computed with either.

By slot: trim, copy, shift, capture, restore. libllama asserts on most wrong arguments, which would
end the process; each method checks them first and raises a typed error that names value, limit and
knob.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllama_raw.errors import (
    ContextFailed,
    InvalidRequest,
    SnapshotFailed,
    Unsupported,
)
from pyllama_raw.native import gguf, libllama
from pyllama_raw.native.gguf import TensorInfo
from pyllama_raw.native.kernels import Kernels
from pyllama_raw.native.libllama import (
    EXCEPTION,
    UINT8,
    Buffer,
    Handle,
    devices,
    ffi,
    last_error,
    lent,
    lib,
    text,
)
from pyllama_raw.native.model import Model
from pyllama_raw.native.params import context_params

CELL_BYTES = 48  # position, shift, window data and sequence bits of a KV cell
_TOKEN_BYTES = 128  # of a graph: its numbers, position and sequences
_PAD = 256  # llama.cpp pads n_ctx
NO_WEIGHTS = {"no_alloc": True, "load_mode": "none", "check_tensors": False}
HOST = "CPU"
_MAX_PARTS = 256
_FLOAT_BYTES = 4
_HALF_BYTES = 2
Bytes = dict[str, int]  # by device


def check_memory(model: Model, params: Any) -> None:
    """
    Refuse a context that llama.cpp would abort on or that cannot fit.

    Raises:
        ContextFailed: names the value, the limit and the knob.
    """
    if model.vocab_only:
        raise _failed("the model was loaded with vocab_only=True and has no weights")
    # What libllama would abort on, then what the system would end the process for.
    check_block_sizes(model, params)
    needed = context_bytes(model, params)
    available = available_bytes()
    if available is not None and needed > available:
        raise _failed(
            f"n_ctx={params.n_ctx} needs at least {_gib(needed)} GiB with "
            f"type_k={_type_name(params.type_k)}, type_v={_type_name(params.type_v)} and "
            f"n_ubatch={params.n_ubatch}, available are {_gib(available)} GiB: "
            "lower n_ctx or n_ubatch, or choose smaller KV types"
        )


def check_lists(params: Any) -> None:
    """
    Refuse a context whose lists would fill much of the memory: they are made to reckon, too.

    Raises:
        ContextFailed: names the values and the limit.
    """
    needed = params.n_ctx * CELL_BYTES + params.n_ubatch * _TOKEN_BYTES
    available = available_bytes()
    if available is not None and needed > available // 4:
        raise _failed(
            f"n_ctx={params.n_ctx} and n_ubatch={params.n_ubatch} need {_gib(needed)} GiB "
            f"for lists of cells and tokens alone, at most a quarter of the available "
            f"{_gib(available)} GiB is allowed: lower them"
        )


def context_bytes(model: Model, params: Any) -> int:
    """A lower bound of the host memory for a context of *params*."""
    # libllama rounds up to a multiple of _PAD.
    n_ctx: int = -(-max(params.n_ctx, _PAD) // _PAD) * _PAD
    # The state of a recurrent model does not grow with n_ctx.
    if model.is_recurrent and not model.is_hybrid:
        return 0
    # The list of cells is on the host, the cells may be on a device.
    needed = n_ctx * CELL_BYTES
    on_device = params.offload_kqv and any(d.kind == "gpu" for d in devices())
    if on_device:
        return needed
    # Layers of a window keep fewer rows, those of a hybrid are not all of attention: a lower
    # bound counts neither.
    if not model.is_hybrid and (params.swa_full or model.n_swa == 0):
        needed += n_ctx * model.n_layer * _row_bytes(model, params)
    n_ctx_seq = n_ctx if params.kv_unified else n_ctx // int(params.n_seq_max)
    n_ubatch: int = min(params.n_ubatch, params.n_batch, params.n_ctx)
    # The attention mask has at least 2 bytes for each cell and token.
    return needed + n_ctx_seq * n_ubatch * 2


def available_bytes() -> int | None:
    """Memory the process can still use: of the machine and of its control group."""
    lines = _file_text("/proc/meminfo").splitlines()
    free = [
        int(line.split()[1]) * 1024
        for line in lines
        if line.startswith(("MemAvailable:", "SwapFree:"))
    ]
    limits = [sum(free)] if free else []
    # A control group, as of a container, may allow less than the machine has.
    limit, used = (
        _file_text(f"/sys/fs/cgroup/memory.{x}").strip() for x in ("max", "current")
    )
    if limit.isdigit() and used.isdigit():
        limits.append(max(int(limit) - int(used), 0))
    # Without /proc, as on macOS, all of the machine's memory is the limit.
    if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def check_block_sizes(model: Model, params: Any) -> None:
    """llama.cpp asserts that rows of K and V are whole blocks of their type."""
    for which, knob in (("key", "type_k"), ("value", "type_v")):
        kind = getattr(params, knob)
        size, n_block = _head_size(model, which), int(lib.ggml_blck_size(kind))
        if size * max(model.n_head_kv, 1) % n_block:
            raise _failed(
                f"{knob}={_type_name(kind)} stores blocks of {n_block} values, "
                f"the heads of this model have {size}: choose f16 or another type"
            )


def _row_bytes(model: Model, params: Any) -> int:
    """K and V of one token in one layer; 0 where attention is compressed (MLA)."""
    # Compressed attention keeps one row for K and V, of another width: a lower bound is 0.
    arch = model.meta.get("general.architecture", "")
    if f"{arch}.attention.kv_lora_rank" in model.meta:
        return 0
    n_head_kv = model.n_head_kv
    k = _head_size(model, "key") * n_head_kv
    v = _head_size(model, "value") * n_head_kv
    return _type_bytes(params.type_k, k) + _type_bytes(params.type_v, v)


def _head_size(model: Model, which: str) -> int:
    """Width of one attention head; 0 if the metadata does not tell."""
    arch = model.meta.get("general.architecture", "")
    text = model.meta.get(f"{arch}.attention.{which}_length", "")
    if text.isdigit():
        return int(text)
    return model.n_embd // model.n_head if model.n_head > 0 else 0


def _type_bytes(kind: int, n_values: int) -> int:
    return int(n_values // lib.ggml_blck_size(kind) * lib.ggml_type_size(kind))


def _type_name(kind: int) -> str:
    return text(lib.ggml_type_name(kind))


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f}"


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def _failed(message: str) -> ContextFailed:
    return ContextFailed("llama_init_from_model", None, message)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes by device, and what libllama makes of the options."""

    weights: Bytes
    kv: Bytes
    compute: Bytes
    n_ctx: int
    can_shift: bool


def breakdown_of(
    model: Model, *, n_seq_max: int, mapped: bool = False, **fields: Any
) -> Breakdown:
    """
    Memory of a context on *model*, which has no weights; the context is gone afterwards.

    Args:
        mapped: its file will be, and stay in memory where weights are put in another order.

    Raises:
        ConfigError: a field is out of range.
        ContextFailed: libllama refuses the options, or lists of cells and tokens would fill the memory.
    """
    # Our kernels have no memory that counts.
    del fields["fast_kernels"]
    params = context_params(fields, n_seq_max=n_seq_max)
    check_block_sizes(model, params)
    check_lists(params)
    # No Context: that would check the memory, and be kept.
    since = libllama.mark()
    pointer = lib.plr_context_new(model.ptr, params)
    if pointer == ffi.NULL:
        raise ContextFailed("llama_init_from_model", None, libllama.reason(since))
    try:
        return _breakdown(model, pointer, params, mapped=mapped)
    finally:
        lib.llama_free(pointer)


def _breakdown(model: Model, pointer: Any, params: Any, *, mapped: bool) -> Breakdown:
    parts = ffi.new("plr_memory_part[]", _MAX_PARTS)
    count = lib.plr_memory_parts(pointer, _MAX_PARTS, parts)
    if count == EXCEPTION:
        raise ContextFailed("llama_get_memory_breakdown", count, last_error())
    # Bytes of each buffer, by the device that it is on; one of no device is the host's.
    weights: Bytes = {HOST: 0}
    kv, compute = dict(weights), dict(weights)
    for part in parts[0:count]:
        device = HOST
        if part.device != ffi.NULL:
            device = text(lib.ggml_backend_dev_name(part.device))
        for sizes, n_bytes in (
            (weights, part.weights),
            (kv, part.cells),
            (compute, part.compute),
        ):
            sizes[device] = sizes.get(device, 0) + int(n_bytes)
    # Weights that are used in the mapped file keep its pages, and those between them.
    if mapped and not any(n for name, n in weights.items() if name != HOST):
        plain = sum(int(part.weights) for part in parts[0:count] if part.is_plain)
        weights[HOST] += max(_mapped_bytes(model, plain) - plain, 0) if plain else 0
    width = model.n_embd_out if params.embeddings else model.n_vocab
    # libllama does not reckon these: outputs, graphs, and a buffer of attention on CPUs.
    compute[HOST] += params.n_outputs_max * width * _FLOAT_BYTES
    compute[HOST] += _graph_bytes(pointer, n_graphs=2 if params.embeddings else 3)
    # Where attention is no single kernel, CPUs multiply with values out of a buffer. It has the
    # weights of all cells once more, as wide as values are.
    off = int(lib.LLAMA_FLASH_ATTN_TYPE_DISABLED)
    if model.reads_sources or int(params.flash_attn_type) == off:
        n_weights = lib.llama_n_ctx_seq(pointer) * lib.llama_n_ubatch(pointer)
        compute[HOST] += int(n_weights * model.n_head * _HALF_BYTES)
    # Nor the list of cells, which recurrent memory has not.
    memory, n_ctx = lib.llama_get_memory(pointer), int(lib.llama_n_ctx(pointer))
    if memory != ffi.NULL and not (model.is_recurrent and not model.is_hybrid):
        kv[HOST] += n_ctx * CELL_BYTES
    return Breakdown(
        weights,
        kv,
        compute,
        n_ctx,
        memory != ffi.NULL and bool(lib.llama_memory_can_shift(memory)),
    )


def _mapped_bytes(model: Model, n_plain: int) -> int:
    """
    Bytes of the file that stay in memory, of weights that are used there and those between them.

    libllama lets go of what is before the first and behind the last weight that is used in the
    file. These are the ones that no product of matrices is made with in another order. If they
    are not *n_plain* bytes, then that is not so, and all of the file stays.
    """
    # The guess is checked against what libllama says of the buffer.
    used = [tensor for tensor in model.header.tensors if _is_used_as_it_is(tensor)]
    if sum(map(gguf.n_bytes, used)) != n_plain:
        return model.size_bytes
    starts = [tensor.offset for tensor in model.header.tensors]
    if starts != sorted(starts):  # those of several files
        return model.size_bytes
    return used[-1].offset + gguf.n_bytes(used[-1]) - used[0].offset


def _is_used_as_it_is(tensor: TensorInfo) -> bool:
    is_matrix = sum(dim > 1 for dim in tensor.dims) == 2
    is_table = "embd" in tensor.name
    return not is_matrix or is_table or tensor.type == int(lib.GGML_TYPE_F32)


def _graph_bytes(pointer: Any, *, n_graphs: int) -> int:
    """
    Bytes of the graphs of a context, which libllama fills with zeros whatever they hold.

    Args:
        n_graphs: the one that is reserved, that of steps with outputs, and without.
    """
    n_nodes = lib.plr_graph_nodes(pointer)
    if n_nodes == EXCEPTION:
        raise ContextFailed("llama_graph_reserve", n_nodes, last_error())
    graph_bytes = n_nodes * lib.ggml_tensor_overhead()
    return n_graphs * int(graph_bytes + lib.ggml_graph_overhead_custom(n_nodes, False))


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
    # A forged state has left what no slot can forget: another context is to be made.
    is_spoilt: bool = False
    has_recurrent_state: bool

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
            if slot != ALL_SLOTS:
                is_done = is_done and self._has_positions(slot)
            # A state that did not fit leaves parts behind: the slot is emptied.
            if not is_done and slot == ALL_SLOTS:
                lib.llama_memory_clear(self._memory, False)
            elif not is_done:
                lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
                # Attention forgets ranges, so positions of no range stay. A recurrent state
                # stays where its position is that of an empty slot, which nobody can see.
                is_empty = lib.llama_memory_seq_pos_max(self._memory, slot) == -1
                self.is_spoilt |= not is_empty or self.has_recurrent_state
            # Our kernels read the cells out of the state, or take them as they lie.
            if self.kernels is not None:
                self.kernels.restored(slot, src, len(data) if is_done else 0)
        self._check_copied("llama_state_seq_set_data_ext", code, n_bytes[0])
        if not is_done:
            message = "it has positions that no slot has"
            raise SnapshotFailed("llama_state_seq_set_data_ext", 0, message)
        return int(n_bytes[0])

    def _has_positions(self, slot: int) -> bool:
        """Whether *slot* has positions, all of which a range can have."""
        lowest = lib.llama_memory_seq_pos_min(self._memory, slot)
        highest = lib.llama_memory_seq_pos_max(self._memory, slot)
        return bool(0 <= lowest <= highest < _POS_MAX)

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
