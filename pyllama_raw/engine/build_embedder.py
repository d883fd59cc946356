"""From a loaded model and a configuration to the parts that make vectors of texts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.scheduling.admission import Admission
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.engine.capabilities import Capabilities
from pyllama_raw.engine.describer import describer
from pyllama_raw.engine.embed_executor import EmbedExecutor, compute
from pyllama_raw.engine.model_info import Pooling
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.engine.shared_models import ModelUse
from pyllama_raw.native.context import AbortFlag, Context, has_gpu
from pyllama_raw.native.kernels import Watch
from pyllama_raw.native.model import Model
from pyllama_raw.options.config import EngineConfig

MAX_TEXTS = 64  # of a step
DEFAULT_CTX = 8192  # tokens of a text that is computed in parts


def assemble_embedder(
    use: ModelUse, config: EngineConfig, capabilities: Capabilities
) -> EngineParts:
    """
    Make the engine of a model that only embeds; *use* is closed with the parts.

    Raises:
        ContextFailed, NativeError: nothing is left behind but *use*.
    """
    model, info = use.model, capabilities.model
    watched = None if has_gpu() else Watch()
    executor = text_contexts(model, config, watched, may_cut=info.is_causal)
    context = executor.prepare(info.pooling or Pooling.NONE)
    assert context is not None
    limits = replace(executor.limits, n_cells=context.n_ctx)

    opened = ExitStack()  # all of it is closed, whatever fails
    opened.callback(use.close)
    opened.callback(executor.shutdown)
    return EngineParts(
        Scheduler(
            limits,
            (),
            token_budget=config.scheduler.token_budget,
            target_step_s=config.scheduler.target_step_s,
        ),
        executor,
        model.vocab,
        None,  # it has no chats
        opened.close,
        Admission(config.scheduler.n_slots, config.scheduler.max_waiting),
        describer(context, config, limits),
        capabilities,
        texts=executor,
        watch=watched,
    )


def text_contexts(
    model: Model, config: EngineConfig, watch: Watch | None, *, may_cut: bool
) -> EmbedExecutor:
    """
    An executor of texts, which has no context yet.

    *watch* notes what its contexts compute; *may_cut* is as the executor says.
    """
    fields = text_fields(model, config)

    def make_context(pooling: Pooling) -> Context:
        context = Context(
            model, abort=AbortFlag(), watch=watch, pooling=pooling.value, **fields
        )
        try:
            with context.one_thread():  # where a failed assertion is an error
                compute(context, 2)
        except BaseException:
            context.close()
            raise
        return context

    n_ctx, n_pack = fields["n_ctx"], fields["n_ubatch"]
    limits = ContextLimits(fields["n_seq_max"], n_ctx - n_pack, n_pack, n_ctx)
    return EmbedExecutor(limits, make_context, may_cut=may_cut)


def text_fields(model: Model, config: EngineConfig) -> dict[str, Any]:
    """Options of a context that makes vectors, but for its pooling."""
    fields: dict[str, Any] = config.context.model_dump()
    return fields | step_fields(model, config) | {"kv_unified": True}


def step_fields(model: Model, config: EngineConfig) -> dict[str, int]:
    """What a step may hold: it is one graph, because most poolings need that."""
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
