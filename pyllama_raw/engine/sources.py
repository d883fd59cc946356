"""
Models whose encoder reads a prompt before their decoder writes: what an engine does otherwise.

libllama keeps what the encoder made of the sources of one batch, and decodes see that alone. So
sequences share a pool of cells, and nothing of one is of use to another. What would count on more
is refused by name.
"""

from __future__ import annotations

from math import isfinite

from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.engine.model_info import ModelClass, ModelInfo
from pyllama_raw.engine.probe import blaming, cost_of, measure, some_tokens
from pyllama_raw.errors import ConfigError, ModelLoadFailed, Unsupported
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import check_decode, last_error
from pyllama_raw.native.model import Model
from pyllama_raw.options.config import CacheConfig, EngineConfig

WHY = "the model reads prompts with an encoder"


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
            f"deterministic={config.deterministic!r}: {WHY}, those of several requests at once: leave it False"
        )
    if not config.context.kv_unified:
        raise ConfigError(
            f"context.kv_unified=False: {WHY}, and its slots share a pool: leave it True"
        )
    if config.media.mmproj is not None:
        raise ConfigError(f"media.mmproj: {WHY}, which takes tokens only: leave it out")
    return config.model_copy(update={"cache": CacheConfig(mode="off")})


def decoder_start(model: Model) -> int | None:
    """
    The token that begins each output; None: *model* goes on with the prompt itself.

    Raises:
        Unsupported: the file names none.
        ModelLoadFailed: it names one that there is not.
    """
    if not model.reads_sources:
        return None
    token = model.vocab.bos if model.decoder_start is None else model.decoder_start
    if token is None:
        reason = "the file names no token that begins an output"
        raise Unsupported("generate", f"{reason}: give decoder_start_token_id")
    if token >= model.n_vocab:
        allowed = f"the vocabulary has {model.n_vocab} tokens"
        raise ModelLoadFailed(model.path, f"decoder_start_token_id={token}: {allowed}")
    return token


def slot_cost(context: Context) -> SnapshotCost:
    """What a slot of *context* costs; raises as measure() and measure_sources() do."""
    start = decoder_start(context.model)
    return measure(context) if start is None else measure_sources(context, start)


def measure_sources(context: Context, start: int) -> SnapshotCost:
    """
    Have *context*, which is empty before and after, read two sources and decode after them.

    Returns:
        What a slot costs.

    Raises:
        ModelLoadFailed: libllama cannot compute the model.
        Unsupported: it computes no numbers.
    """
    model, n_slots = context.model, min(context.n_seq_max, context.n_ubatch, 2)
    *source, third = some_tokens(context)
    source = source[: context.n_ubatch // n_slots]
    sizes: list[int] = []
    with context.one_thread(), blaming(model):
        for pos, token in enumerate((start, third)):
            batch = Batch(2 * n_slots)
            for slot in range(n_slots):
                batch.add_scored(source, pos, slot)
            check_decode(context.read_sources(batch).code, last_error())
            batch.clear()
            batch.add_rows([token] * n_slots, [pos] * n_slots, list(range(n_slots)))
            context.decode(batch)
            sizes.append(context.state_bytes(0))
            rows = [context.logits(row) for row in range(n_slots)]
            if not all(isfinite(value) for row in rows for value in row):
                raise Unsupported("generate", "libllama computes no numbers of it")
        context.clear()
    return cost_of(1, *sizes)
