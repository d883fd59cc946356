"""From a model file and a configuration to the parts of an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyllama_raw.config import ContextConfig, EngineConfig
from pyllama_raw.core.scheduler import Scheduler
from pyllama_raw.core.slots import ContextLimits
from pyllama_raw.engine.executor import NativeExecutor
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.errors import Unsupported
from pyllama_raw.native.abort import AbortFlag
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model

DEFAULT_CTX_SLOT = 2048  # tokens a slot, unless the model was trained on fewer


def build(
    path: Path, config: EngineConfig, progress: Callable[[float], bool] | None = None
) -> EngineParts:
    """
    Load the model and make its context; blocks for as long as that takes.

    Args:
        progress: gets the loaded fraction; returning False cancels the load.

    Raises:
        ModelLoadFailed, ContextFailed, LibraryNotBuilt: nothing is left behind.
        Unsupported: the model does not generate text token by token.
    """
    model = Model.load(path, progress=progress, **config.model.model_dump())
    try:
        return _assemble(model, config)
    except BaseException:
        model.close()
        raise


def _assemble(model: Model, config: EngineConfig) -> EngineParts:
    _check_generates(model)
    n_slots = config.scheduler.n_slots
    fields = context_fields(config.resolved_context, n_slots, model.n_ctx_train)
    flag = AbortFlag()
    make_context = partial(Context, model, n_seq_max=n_slots, abort=flag, **fields)
    executor = NativeExecutor(
        make_context, model.vocab.eog_tokens, can_trim=_can_trim(model, config)
    )
    if not executor.context.has_memory:
        executor.shutdown()
        raise Unsupported("a pure encoder does not generate text")
    _warm_up(executor.context)
    options = config.scheduler.model_dump(exclude={"n_slots"})
    scheduler = Scheduler(
        limits_of(executor.context, config), model.vocab.pieces, **options
    )

    def release() -> None:
        executor.shutdown()
        model.close()

    return EngineParts(
        scheduler, executor, flag, model.vocab, model.chat_template(), release
    )


def context_fields(
    config: ContextConfig, n_slots: int, n_ctx_train: int
) -> dict[str, object]:
    """Arguments of Context, with what was left open decided."""
    n_ctx = config.n_ctx or n_slots * min(DEFAULT_CTX_SLOT, n_ctx_train)
    decided = {"n_ctx": n_ctx, "n_threads": config.threads}
    return config.model_dump() | decided


def limits_of(context: Context, config: EngineConfig) -> ContextLimits:
    model = context.model
    stretched = config.context.rope_scaling not in ("model", "none")
    n_ctx_slot = context.n_ctx_seq
    if not stretched:
        n_ctx_slot = min(n_ctx_slot, model.n_ctx_train)
    return ContextLimits(
        n_slots=config.scheduler.n_slots,
        n_ctx_slot=n_ctx_slot,
        n_batch=context.max_tokens,
        n_cells=context.n_ctx,
        unified=context.kv_unified,
        can_shift=context.can_shift and _can_trim(model, config),
    )


def _can_trim(model: Model, config: EngineConfig) -> bool:
    """Recurrent state cannot go back, a sliding window has lost what it would need."""
    if model.is_recurrent or model.is_hybrid:
        return False
    return model.n_swa == 0 or config.context.swa_full


def _warm_up(context: Context) -> None:
    """Read the weights and reserve memory now, not in the first request."""
    batch = Batch(1)
    batch.add([0], 0, 0, output=True)
    context.decode(batch)
    context.clear()


def _check_generates(model: Model) -> None:
    if model.is_diffusion:
        raise Unsupported("a diffusion model does not generate token by token")
    if model.has_encoder or not model.has_decoder:
        raise Unsupported(
            "a model with an encoder cannot generate here: give a decoder-only model"
        )
