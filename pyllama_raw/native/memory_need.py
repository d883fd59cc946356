"""
The memory that a context will need: a lower bound, and what libllama reckons by device.

Linux grants more than there is and kills the process when it is used; so a size that cannot fit is
refused before libllama asks for it. The bound is a lower one: it never refuses what fits.

libllama tells all of it without a weight being read. A model that was loaded with no_alloc has the
shapes of its weights and no data. Of a context on it libllama reckons all buffers, and allocates
those of recurrent states only. Nothing may be computed with either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllama_raw.errors import ContextFailed
from pyllama_raw.native import gguf, libllama
from pyllama_raw.native.gguf import TensorInfo
from pyllama_raw.native.libllama import (
    EXCEPTION,
    devices,
    ffi,
    last_error,
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
