"""Facts of an engine: its model and what its options came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama_raw.options.config import EngineConfig


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One open engine; none of it changes."""

    model_path: str
    metadata: Mapping[str, str]  # of the model file
    n_slots: int
    n_ctx: int  # KV cells of all slots
    n_ctx_slot: int  # tokens of one request, prompt and output
    n_batch: int  # most tokens of a step
    n_ubatch: int  # most tokens of a graph
    n_threads: int
    n_threads_batch: int
    type_k: str
    type_v: str
    flash_attn: str  # as asked for: libllama decides by itself what "auto" is
    kv_unified: bool
    # Those of ours: the attention or weights, the CPU they are for.
    kernels: Mapping[str, str]
    devices: tuple[str, ...]  # that the model may use
    versions: Mapping[str, str]  # of pyllama_raw and llama_cpp
    config: EngineConfig
