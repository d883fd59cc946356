"""
The least memory that a context will need, checked before libllama asks for it.

Linux grants more than there is and kills the process when it is used; so a size that
cannot fit is refused here. The estimate is a lower bound: it never refuses what fits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pyllama_raw.errors import ContextFailed
from pyllama_raw.native.libllama import devices, lib, text
from pyllama_raw.native.model import Model

CELL_BYTES = 48  # position, shift, window data and sequence bits of a KV cell
_TOKEN_BYTES = 128  # of a graph: its numbers, position and sequences
_PAD = 256  # llama.cpp pads n_ctx


def check_memory(model: Model, params: Any) -> None:
    """
    Refuse a context that llama.cpp would abort on or that cannot fit.

    Raises:
        ContextFailed: names the value, the limit and the knob.
    """
    if model.vocab_only:
        raise _failed("the model was loaded with vocab_only=True and has no weights")
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
    n_ctx: int = -(-max(params.n_ctx, _PAD) // _PAD) * _PAD
    if model.is_recurrent and not model.is_hybrid:
        return 0  # the state does not grow with n_ctx
    needed = n_ctx * CELL_BYTES
    on_device = params.offload_kqv and any(d.kind == "gpu" for d in devices())
    if on_device:
        return needed
    if not model.is_hybrid and (params.swa_full or model.n_swa == 0):
        needed += n_ctx * model.n_layer * _row_bytes(model, params)
    n_ctx_seq = n_ctx if params.kv_unified else n_ctx // int(params.n_seq_max)
    n_ubatch: int = min(params.n_ubatch, params.n_batch, params.n_ctx)
    # the attention mask, at least 2 bytes each
    return needed + n_ctx_seq * n_ubatch * 2


def available_bytes() -> int | None:
    """Memory the process can still use: of the machine and of its control group."""
    lines = _read("/proc/meminfo").splitlines()
    free = [
        int(line.split()[1]) * 1024
        for line in lines
        if line.startswith(("MemAvailable:", "SwapFree:"))
    ]
    limits = [sum(free)] if free else []
    limit, used = (
        _read(f"/sys/fs/cgroup/memory.{x}").strip() for x in ("max", "current")
    )
    if limit.isdigit() and used.isdigit():
        limits.append(max(int(limit) - int(used), 0))
    if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def _row_bytes(model: Model, params: Any) -> int:
    """K and V of one token in one layer; 0 where attention is compressed (MLA)."""
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


def _type_name(kind: int) -> str:
    return text(lib.ggml_type_name(kind))


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def _failed(message: str) -> ContextFailed:
    return ContextFailed("llama_init_from_model", None, message)
