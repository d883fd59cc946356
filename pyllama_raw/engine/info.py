"""Facts of an engine: its model and what its options came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama_raw.options.config import EngineConfig


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token with a task of its own."""

    token_id: int
    """The token."""
    text: str
    """Its name, as chat templates write it."""


@dataclass(frozen=True, slots=True)
class VocabInfo:
    """The vocabulary of a model; None stands for a token that it does not have."""

    n_tokens: int
    """Token ids are below this."""
    bos: SpecialToken | None
    """The token that begins a text."""
    eos: SpecialToken | None
    """The token that ends a text."""
    adds_bos: bool
    """Whether a prompt that is a text gets bos in front."""
    adds_eos: bool
    """Whether a prompt that is a text gets eos behind."""
    fill: Mapping[str, SpecialToken]
    """
    Tokens for a gap in a text: of "prefix", "suffix", "middle", "pad", "repo" and
    "separator" those that the model has; it can fill a gap if it has the first three.
    """
    decoder_start: SpecialToken | None = None
    """The token that begins an output, if the model reads the prompt with an encoder."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One open engine; none of it changes."""

    model_path: str
    description: str  # of the model: architecture, size class and file type in words
    n_params: int  # of the model
    model_bytes: int  # of its tensors
    vocab: VocabInfo
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
    can_cut: bool  # the memory of a prefix can be cut anywhere; else snapshots are kept
    # Those of ours: the attention or weights, the CPU they are for.
    kernels: Mapping[str, str]
    devices: tuple[str, ...]  # that the model may use
    versions: Mapping[str, str]  # of pyllama_raw and llama_cpp
    config: EngineConfig
    # Where chats have their template from: "model", a name, a path or "text"; None: none.
    chat_template: str | None = None
