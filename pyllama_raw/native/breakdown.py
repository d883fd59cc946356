"""
Memory of a model and its context by device, told by libllama without a weight being read.

A model that was loaded with no_alloc has the shapes of its weights and no data. Of a context
on it libllama reckons all buffers, and allocates those of recurrent states only. Nothing may
be computed with either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pyllama_raw.errors import ContextFailed
from pyllama_raw.native import gguf_check, log
from pyllama_raw.native.check import EXCEPTION
from pyllama_raw.native.demand import CELL_BYTES, check_block_sizes, check_lists
from pyllama_raw.native.gguf_header import TensorInfo
from pyllama_raw.native.libllama import device_pointers, ffi, last_error, lib, text
from pyllama_raw.native.model import Model
from pyllama_raw.native.params import context_params
from pyllama_raw.native.projector import projector_params
from pyllama_raw.native.projector_check import check_projector

NO_WEIGHTS = {"no_alloc": True, "load_mode": "none", "check_tensors": False}
HOST = "CPU"
_MAX_PARTS = 256
_FLOAT_BYTES = 4
_HALF_BYTES = 2

Bytes = dict[str, int]  # by device


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
    del fields["fast_kernels"]  # they have no memory that counts
    params = context_params(fields, n_seq_max=n_seq_max)
    check_block_sizes(model, params)
    check_lists(params)
    since = log.mark()
    pointer = lib.plr_context_new(model.ptr, params)
    if pointer == ffi.NULL:
        raise ContextFailed("llama_init_from_model", None, log.reason(since))
    try:
        return _read(model, pointer, params, mapped=mapped)
    finally:
        lib.llama_free(pointer)


def _read(model: Model, pointer: Any, params: Any, *, mapped: bool) -> Breakdown:
    parts = ffi.new("plr_memory_part[]", _MAX_PARTS)
    count = lib.plr_memory_parts(pointer, _MAX_PARTS, parts)
    if count == EXCEPTION:
        raise ContextFailed("llama_get_memory_breakdown", count, last_error())
    weights: Bytes = {HOST: 0}
    kv, compute = dict(weights), dict(weights)
    for part in parts[0:count]:
        device = HOST
        if part.device != ffi.NULL:
            device = text(lib.ggml_backend_dev_name(part.device))
        for found, n_bytes in (
            (weights, part.weights),
            (kv, part.cells),
            (compute, part.compute),
        ):
            found[device] = found.get(device, 0) + int(n_bytes)
    if mapped and not any(n for name, n in weights.items() if name != HOST):
        plain = sum(int(part.weights) for part in parts[0:count] if part.is_plain)
        weights[HOST] += max(_mapped_bytes(model, plain) - plain, 0) if plain else 0
    width = model.n_embd_out if params.embeddings else model.n_vocab
    compute[HOST] += params.n_outputs_max * width * _FLOAT_BYTES  # what it gives out
    compute[HOST] += _graph_bytes(pointer, n_graphs=2 if params.embeddings else 3)
    off = int(lib.LLAMA_FLASH_ATTN_TYPE_DISABLED)
    if model.reads_sources or int(params.flash_attn_type) == off:
        compute[HOST] += _weights_of_attention(pointer, model.n_head)
    memory, n_ctx = lib.llama_get_memory(pointer), int(lib.llama_n_ctx(pointer))
    if memory != ffi.NULL and not (model.is_recurrent and not model.is_hybrid):
        kv[HOST] += n_ctx * CELL_BYTES  # the list of cells
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
    used = [tensor for tensor in model.header.tensors if _is_used_as_it_is(tensor)]
    if sum(map(gguf_check.n_bytes, used)) != n_plain:
        return model.size_bytes
    starts = [tensor.offset for tensor in model.header.tensors]
    if starts != sorted(starts):  # those of several files
        return model.size_bytes
    return used[-1].offset + gguf_check.n_bytes(used[-1]) - used[0].offset


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
    each = n_nodes * lib.ggml_tensor_overhead()
    return n_graphs * int(each + lib.ggml_graph_overhead_custom(n_nodes, False))


def _weights_of_attention(pointer: Any, n_head: int) -> int:
    """
    Bytes of the buffer in which CPUs multiply with values, where attention is no single kernel.

    The weights of all cells are there once more, as wide as the values are.
    """
    n_cells, n_tokens = lib.llama_n_ctx_seq(pointer), lib.llama_n_ubatch(pointer)
    return int(n_cells * n_tokens * n_head * _HALF_BYTES)


def projector_bytes(
    path: str | os.PathLike[str],
    *,
    use_gpu: bool,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
) -> Bytes:
    """
    Memory of the projector at *path*, by device.

    Raises:
        ModelLoadFailed, ProjectorLoadFailed, Unsupported: it cannot be used.
    """
    name = os.fspath(path)
    check_projector(name, on_host=False)
    params = projector_params(1, use_gpu, min_tokens, max_tokens)
    found = {
        device: int(lib.plr_projector_bytes(os.fsencode(name), params, pointer))
        for device, pointer in device_pointers().items()
    }
    return {device: n_bytes for device, n_bytes in found.items() if n_bytes}
