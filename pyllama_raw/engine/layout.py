"""
What options come to on a model: its sequences, the sizes of its context, limits, and a description.

An estimate asks the same functions as an engine that is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Any

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.engine.info import (
    EngineInfo,
    ModelClass,
    ModelInfo,
    SpecialToken,
    VocabInfo,
)
from pyllama_raw.engine.probe import expected_kind
from pyllama_raw.errors import ConfigError
from pyllama_raw.native import libllama
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.options.chat_templates import ChatTemplate
from pyllama_raw.options.config import CacheConfig, ContextConfig, EngineConfig
from pyllama_raw.options.version import __version__

MAX_SEQS = 256  # llama.cpp: LLAMA_MAX_SEQ
DEFAULT_OUTPUTS = 32  # rows a step: more make scores of prompts faster, and cost memory
DEFAULT_CTX_SLOT = 2048  # tokens a slot, unless the model was trained on fewer
MAX_TEXTS = 64  # of a step
DEFAULT_CTX = 8192  # tokens of a text that is computed in parts
BY_ENCODER = "the model reads prompts with an encoder"
# Why libllama changes a size that somebody chose.
_REASONS = {
    "n_ctx": "libllama rounds cells up to multiples of 256, or of 256 a slot",
    "n_batch": "a step has at most n_ctx tokens",
    "n_ubatch": "a graph has at most the tokens of a step",
    "n_outputs_max": "a step has at least a row for each sequence, at most n_batch",
}

_log = getLogger(__name__)


def checked_config(info: ModelInfo, config: EngineConfig) -> EngineConfig:
    """
    The options of an engine on the model of *info*: nothing is reused where there are sources.

    Raises:
        ConfigError: an option that such a model cannot have.
    """
    if info.model_class is not ModelClass.ENCODER_DECODER:
        return config
    if config.deterministic:
        raise ConfigError(
            f"deterministic={config.deterministic!r}: {BY_ENCODER}, those of several requests at once: leave it False"
        )
    if not config.context.kv_unified:
        raise ConfigError(
            f"context.kv_unified=False: {BY_ENCODER}, and its slots share a pool: leave it True"
        )
    if config.media.mmproj is not None:
        raise ConfigError(
            f"media.mmproj: {BY_ENCODER}, which takes tokens only: leave it out"
        )
    return config.model_copy(update={"cache": CacheConfig(mode="off")})


def context_fields(
    config: ContextConfig, n_slots: int, n_ctx_train: int
) -> dict[str, Any]:
    """Arguments of Context, with what was left open decided."""
    n_ctx = config.n_ctx or n_slots * min(DEFAULT_CTX_SLOT, n_ctx_train)
    decided = {
        "n_ctx": n_ctx,
        "n_threads": config.threads,
        "n_outputs_max": config.n_outputs_max or DEFAULT_OUTPUTS,
    }
    return config.model_dump() | decided


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Uses of the sequences of a context: slots first, then parked, then scratch."""

    kind: SnapshotKind
    n_slots: int
    n_parked: int
    n_scratch: int

    @property
    def n_seq_max(self) -> int:
        return self.n_slots + self.n_parked + self.n_scratch

    @property
    def scratch(self) -> int:
        return self.n_slots + self.n_parked


def layout_of(model: Model, config: EngineConfig) -> SequenceLayout:
    """
    Parked slots hold what idle ones would forget.

    Where snapshots do that there are none by default: a restore costs milliseconds once,
    but each cell that is kept is looked at by every decode of unified KV.

    Raises:
        ConfigError: slots and snapshots need more sequences than libllama has.
    """
    cache, n_slots = config.cache, config.scheduler.n_slots
    # The memory of the model decides what a snapshot is.
    kind = expected_kind(model, config.resolved_context)
    # Points are kept without the positions before them, but those in files are whole, and a
    # purely recurrent state has no positions.
    in_host = cache.mode == "snapshots" and cache.directory is None
    has_positions = config.resolved_context.kv_unified and not model.is_recurrent
    if kind is SnapshotKind.EXACT and in_host and has_positions:
        kind = SnapshotKind.CHAIN
    # Without snapshots, parked slots keep what idle ones would forget.
    per_slot = {SnapshotKind.RANGE: 2, SnapshotKind.EXACT: 1}
    n_parked = per_slot.get(kind, 0) * n_slots if cache.mode == "live" else 0
    if cache.parked_slots is not None:
        n_parked = cache.parked_slots
    if cache.mode == "off" or kind is SnapshotKind.STATE:
        n_parked = 0
    # A part of a slot is saved by way of scratch.
    saves = cache.mode == "snapshots" or (
        cache.mode == "live" and cache.directory is not None
    )
    n_scratch = int(kind.is_part and saves)
    # libllama has so many sequences and no more.
    n_left = MAX_SEQS - n_slots - n_scratch
    if n_left < 0:
        raise ConfigError(
            f"n_slots={n_slots} leaves no sequence for snapshots to be taken with: "
            f"at most {MAX_SEQS - n_scratch}, or CacheConfig(mode='live')"
        )
    return SequenceLayout(kind, n_slots, min(n_parked, n_left), n_scratch)


def limits_of(
    context: Context, config: EngineConfig, layout: SequenceLayout
) -> ContextLimits:
    model = context.model
    stretched = config.context.rope_scaling not in ("model", "none")
    n_ctx_slot = context.n_ctx_seq
    # A model is asked for no more positions than it was trained on.
    if not stretched:
        n_ctx_slot = min(n_ctx_slot, model.n_ctx_train)
    n_batch = context.max_tokens
    is_pinned = config.deterministic is True
    if is_pinned:  # else the rest of a chunk could be a graph of one token
        n_batch = min(n_batch, context.n_ubatch)
    return ContextLimits(
        n_slots=config.scheduler.n_slots,
        n_ctx_slot=n_ctx_slot,
        n_batch=n_batch,
        n_cells=context.n_ctx,
        n_parked=layout.n_parked,
        unified=context.kv_unified and not model.is_recurrent,
        deterministic=is_pinned,
        can_shift=context.can_shift and layout.kind.can_cut and not model.reads_sources,
        kind=layout.kind,
        n_outputs=context.n_outputs_max,
        n_swa=model.n_swa,
        n_ubatch=context.n_ubatch,
        n_source=min(context.n_ubatch, n_batch) if model.reads_sources else 0,
    )


def text_fields(model: Model, config: EngineConfig) -> dict[str, Any]:
    """Options of a context that makes vectors, but for its pooling."""
    fields: dict[str, Any] = config.context.model_dump()
    return fields | step_fields(model, config) | {"kv_unified": True}


def step_fields(model: Model, config: EngineConfig) -> dict[str, int]:
    """What a step may hold: it is one graph, because most poolings need that."""
    # libllama keeps a row of logits for each token of a step.
    n_free = config.embedding.max_step_bytes // (4 * model.n_vocab)
    n_pack = max(min(config.embedding.max_step_tokens, n_free), 2)
    n_texts = min(MAX_TEXTS, n_pack)
    n_pack -= n_pack % n_texts  # libllama prepares graphs of whole tokens a text only
    n_text = min(model.n_ctx_train, config.context.n_ctx or DEFAULT_CTX)
    return {
        "n_seq_max": n_texts,
        "n_ctx": n_text + n_pack,
        "n_batch": n_pack,
        "n_ubatch": n_pack,
        "n_outputs_max": n_pack,
        "n_threads": config.context.threads,
    }


def describer(
    context: Context,
    config: EngineConfig,
    limits: ContextLimits,
    template: ChatTemplate | None = None,
) -> Callable[[], EngineInfo]:
    """Keep what can be said at once: the context may be closed when somebody asks."""
    options, model = config.resolved_context, context.model
    table = context.kernels.taken if context.kernels is not None else ()
    snapshot = partial(
        EngineInfo,
        model_path=str(model.path),
        description=model.desc,
        n_params=model.n_params,
        model_bytes=model.size_bytes,
        vocab=_vocab(model),
        metadata=dict(model.meta),
        n_slots=limits.n_slots,
        n_ctx=limits.n_cells,
        n_ctx_slot=limits.n_ctx_slot,
        n_batch=limits.n_batch,
        n_ubatch=context.n_ubatch,
        n_threads=options.threads,
        n_threads_batch=options.n_threads_batch or options.threads,
        type_k=options.type_k,
        type_v=options.type_v,
        flash_attn=options.flash_attn,
        kv_unified=limits.unified,
        can_cut=limits.kind.can_cut,
        kernels={row.computes: row.needs for row in table},
        config=config,
        chat_template=None if template is None else template.source,
    )

    def describe() -> EngineInfo:
        theirs = libllama.llama_version()
        devices = config.model.devices or [d.name for d in libllama.devices()]
        return snapshot(
            devices=tuple(devices),
            versions={"pyllama_raw": __version__, "llama_cpp": theirs},
        )

    return describe


def _vocab(model: Model) -> VocabInfo:
    vocab = model.vocab

    def special(token: int | None) -> SpecialToken | None:
        if token is None:
            return None
        text = vocab.piece(token, special=True).decode(errors="replace")
        return SpecialToken(token, text)

    fill = {name: special(token) for name, token in vocab.fill_tokens.items()}
    return VocabInfo(
        n_tokens=vocab.n_tokens,
        bos=special(vocab.bos),
        eos=special(vocab.eos),
        decoder_start=special(model.decoder_start if model.reads_sources else None),
        adds_bos=vocab.add_bos,
        adds_eos=vocab.add_eos,
        fill={name: token for name, token in fill.items() if token is not None},
    )


def tell_changes(options: ContextConfig, context: Context) -> None:
    """A warning for each size that somebody chose and that is another one."""
    for name, reason in _REASONS.items():
        requested, actual = getattr(options, name), getattr(context, name)
        if name in options.model_fields_set and requested not in (None, actual):
            _log.warning("%s=%d is made %d: %s", name, requested, actual, reason)
