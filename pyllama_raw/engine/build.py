"""
From a loaded model and a configuration to the parts of an engine, in the order in which it happens.

A model that generates gets a context for its slots, and one that only embeds those of texts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost, Tier
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.engine.draft_executor import open_drafts, open_heads
from pyllama_raw.engine.embed_executor import EmbedExecutor, compute
from pyllama_raw.engine.executor import NativeExecutor
from pyllama_raw.engine.info import (
    Capabilities,
    Operation,
    Pooling,
    capabilities_of,
    model_info,
    operations,
)
from pyllama_raw.engine.layout import (
    SequenceLayout,
    checked_config,
    context_fields,
    decoder_start,
    describer,
    layout_of,
    limits_of,
    slot_cost,
    speculation_of,
    tell_changes,
    text_fields,
)
from pyllama_raw.engine.life import Restarts
from pyllama_raw.engine.logs import open_logs
from pyllama_raw.engine.media_desk import MediaDesk
from pyllama_raw.engine.parts import EngineParts, Inheritance, KeptMemory
from pyllama_raw.engine.requests import Admission
from pyllama_raw.engine.sampling import Constraints, Lanes, lanes_refusal
from pyllama_raw.engine.shared_models import (
    ModelFile,
    ModelUse,
    fingerprint,
    model_files,
)
from pyllama_raw.engine.state_files import (
    ENTRY_BYTES,
    INDEX_BYTES,
    DiskWriter,
    SpanKeys,
    head_bytes,
    n_parts_of,
)
from pyllama_raw.engine.watcher import PolicyLog
from pyllama_raw.errors import ConfigError
from pyllama_raw.native.context import AbortFlag, Context, has_gpu
from pyllama_raw.native.kernels import Watch, weaves
from pyllama_raw.native.libllama import check_states_of_files, pass_on_lines
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import SamplerChain
from pyllama_raw.options.chat_templates import (
    FALLBACK,
    FALLBACK_SOURCE,
    ChatTemplate,
    model_template,
)
from pyllama_raw.options.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
)
from pyllama_raw.policy import make_policy

if TYPE_CHECKING:
    from pyllama_raw.engine.disk_store import DiskStore

_log = getLogger(__name__)

MAX_FILES = 2**20


def build_on(
    use: ModelUse,
    config: EngineConfig | None,
    needs: str | None = None,
    inheritance: Inheritance | None = None,
) -> EngineParts:
    """
    The parts of an engine on a model that is loaded; *use* is closed with them.

    Args:
        needs: an operation that the model must be able to do; None: any.
        inheritance: what there is of earlier parts of the engine.
    """
    with ExitStack() as undo:
        undo.callback(pass_on_lines)
        undo.callback(use.close)
        config, model = config or EngineConfig(), use.model
        # What the model can do, by its header, and by what libllama makes of it.
        capabilities = capabilities_of(model_info(model.path, model.header))
        if model.is_recurrent or model.is_hybrid:
            capabilities = capabilities.without(
                "the model keeps a recurrent state of its texts",
                Operation.EMBED,
                Operation.RANK,
            )
        capabilities.check(*operations(needs))
        if Operation.GENERATE in capabilities.operations:
            memory = None if inheritance is None else inheritance.memory
            parts = assemble(use, config, capabilities, memory)
        else:
            parts = assemble_embedder(use, config, capabilities)
        undo.callback(parts.release)
        # Logs and the budget of restarts may be those of the session before.
        logs = restarts = None
        if inheritance is not None:
            restarts = inheritance.restarts
            logs = (
                inheritance.logs.share()
                if inheritance.log_config == config.log
                else None
            )
        engine = replace(
            parts,
            metadata=model.meta,
            labels=model.labels,
            model_files=use.files,
            logs=logs or open_logs(config.log),
            restarts=restarts or Restarts(config.max_restarts),
        )
        if config.warm_up:
            engine.executor.warm_up()
        undo.pop_all()
    pass_on_lines()
    limits = engine.scheduler.limits
    text = "opened %s: %d slots, %d cells"
    _log.info(text, model.path, limits.n_slots, limits.n_cells)
    return engine


def assemble(
    use: ModelUse,
    config: EngineConfig,
    capabilities: Capabilities,
    memory: KeptMemory | None = None,
) -> EngineParts:
    """
    Make the context of a model and what runs on it; *use* is closed with the parts.

    Args:
        memory: of an earlier context, for one that is the same: the engine sleeps then, and
            changes nothing of it before it is woken.

    Raises:
        ConfigError: it is to be deterministic and fast, and cannot.
        ContextFailed: *use* may be closed already.
        Unsupported: the model does not generate text token by token.
    """
    model, config = use.model, checked_config(capabilities.model, config)
    # What options come to on this model.
    layout, start = layout_of(model, config), decoder_start(model)
    fields = context_fields(
        config.resolved_context, config.scheduler.n_slots, model.n_ctx_train
    )
    flag = AbortFlag()
    facts = {"n_seq_max": layout.n_seq_max, "deterministic": config.deterministic}
    # States of earlier processes, and of this engine before it slept.
    store = open_store(model, use.files, config, fields | facts)
    memory = memory if memory and memory.fits(use.files, config) else None
    keys = memory.span_keys if memory else SpanKeys()
    writer = None if store is None else DiskWriter(store)
    watched = None if has_gpu() else Watch()

    has_heads = speculation_of(model, config, layout.kind) == "mtp"

    def make_context(lanes: Sequence[SamplerChain]) -> Context:
        context = Context(
            model,
            n_seq_max=layout.n_seq_max,
            abort=flag,
            lanes=lanes,
            deterministic=config.deterministic,
            watch=watched,
            **fields,
        )
        # Heads go on from what the model had of each token.
        if has_heads:
            context.keep_hidden(of_rows=False)
        return context

    # Texts become vectors in contexts of their own, made when they are first wanted.
    waits, texts = config.scheduler, None
    if Operation.EMBED in capabilities.operations:
        is_causal = capabilities.model.is_causal
        texts = text_contexts(model, config, watched, may_cut=is_causal)
    # The context for slots. From here on there is something to close.
    executor = NativeExecutor(
        make_context,
        # A sequence may run in a parked slot, too.
        lanes=Lanes(model.vocab, layout.scratch, off=lanes_refusal(model, config)),
        kind=layout.kind,
        scratch=layout.scratch,
        disk=writer,
        texts=texts,
    )
    resources = ExitStack()  # all of it is closed, whatever fails
    resources.callback(use.close)
    resources.callback(executor.shutdown)
    if writer is not None:
        resources.callback(writer.close)
    try:
        tell_changes(config.context, executor.context)
        # A few decodes tell what a snapshot costs, and whether rows depend on each other.
        cost = slot_cost(executor.context)
        coupling = coupling_of(executor.context, config)
        speculation = speculation_of(model, config, layout.kind, coupling)
        executor.speculates = not speculation.startswith("off")
        if config.speculation.mode != "auto" and speculation.startswith("off:"):
            _log.warning("speculation is %s", speculation)
        if speculation == "draft":
            n_ctx = executor.context.n_ctx
            executor.drafts = open_drafts(config, model, n_ctx, layout.scratch)
        elif speculation == "mtp":
            n_ctx = executor.context.n_ctx
            executor.drafts = open_heads(config, use, n_ctx, layout.scratch)
        limits = None if texts is None else texts.limits
        scheduler = _make_scheduler(
            executor, config, layout, store, keys, cost=cost, texts=limits
        )
        executor.attach_lanes()
        # The scheduler of the context before this one knows what its slots held.
        if memory is not None:
            scheduler = memory.scheduler
        template = None if start is not None else chat_template_of(model, config.model)
        # Images and sounds, if there is a projector.
        media = None
        if config.media.mmproj is not None:
            media = MediaDesk(use, config, keys)
            resources.callback(media.close)
            # The header has said what the model can do; the projector says what it sees.
            projector = media.projector
            capabilities = replace(
                capabilities, images=projector.sees, sounds=projector.hears
            )
        return EngineParts(
            scheduler,
            executor,
            model.vocab,
            None if template is None else template.text,
            resources.close,
            Admission(waits.n_slots, waits.max_waiting, waits.max_waiting_tokens),
            describer(
                executor.context, config, scheduler.limits, template, speculation
            ),
            capabilities,
            config.cache.scope,
            writer,
            make_rules=Constraints(model.vocab).rules,
            texts=texts,
            span_keys=keys,
            media=media,
            watch=watched,
            adapter_host=executor if start is None else None,
            max_adapter_bytes=config.max_adapter_bytes,
            decoder_start=start,
            template_process=config.model.template_process,
            memory=memory.state if memory else None,
            state_name=partial(state_name, model, use.files, config, fields | facts),
        )
    except BaseException:
        resources.close()
        raise


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

    resources = ExitStack()  # all of it is closed, whatever fails
    resources.callback(use.close)
    resources.callback(executor.shutdown)
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
        resources.close,
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


def coupling_of(context: Context, config: EngineConfig) -> str:
    """
    Why rows of *context*, which has computed some, depend on what is beside them; empty: they do not.

    Either kernels of libllama take part whose sums do, or cells are not listed by position in a
    pool for all slots.

    Raises:
        ConfigError: they do, and *config* says that they do not.
    """
    model, kernels = context.model, context.kernels
    is_woven = kernels is not None and any(row.is_woven for row in kernels.taken)
    # Rows of an image may share a position, and windows and states have caches of their own.
    has_other_memory = model.n_swa or model.is_recurrent or model.is_hybrid
    has_other_memory = has_other_memory or config.media.mmproj is not None
    why = ""
    if not weaves(model.header):
        why = "weights are of types that our kernels do not weave on this CPU"
    elif not is_woven:
        why = "weights are not woven, because they are not mapped or libllama repacks them"
    elif kernels is not None and kernels.stray:
        why = f"libllama computes {kernels.stray}"
        cells = config.resolved_context
        if not cells.type_k == cells.type_v == "f16":
            types = f"type_k={cells.type_k!r}, type_v={cells.type_v!r}"
            why += f", because our attention reads cells of f16 only ({types})"
    elif has_other_memory and context.kv_unified:
        why = "with windows, states or images it needs context.kv_unified=False"
    if why and config.deterministic == "fast":
        raise ConfigError(
            f"deterministic='fast': {model.path}: {why}; or take deterministic=True"
        )
    return why


def chat_template_of(model: Model, config: ModelConfig) -> ChatTemplate | None:
    """
    The template for chats with *model*. The log has a line if it is the fallback.

    Raises:
        ConfigError: the template that *config* names is not there any more.
    """
    if model.vocab.kind == "none":
        return None  # nobody can chat by token ids
    own = model.chat_template()
    try:
        template = model_template(config.chat_template, own)
    except ValueError as error:
        raise ConfigError(f"chat_template={config.chat_template!r}: {error}") from error
    if template is not None and template.source == FALLBACK_SOURCE:
        text = "%s has no chat template: chats have %s, which it may not know"
        _log.warning(text, model.path, FALLBACK)
    return template


def _make_scheduler(
    executor: NativeExecutor,
    config: EngineConfig,
    layout: SequenceLayout,
    store: DiskStore | None,
    keys: SpanKeys,
    *,
    cost: SnapshotCost,
    texts: ContextLimits | None,
) -> Scheduler:
    context, drafts = executor.context, executor.drafts
    return Scheduler(
        limits_of(context, config, layout),
        context.model.vocab.pieces,
        cache=make_cache(config.cache, layout.kind),
        disk=None if store is None else make_disk_tier(store, layout.kind, cost, keys),
        snapshot_cost=cost,
        snapshot_interval_tokens=config.cache.snapshot_interval_tokens,
        texts=texts,
        speculates=executor.speculates,
        exact_drafts=config.speculation.mode == "auto",
        draft=None if drafts is None else drafts.limits,
        policy=make_policy(config.scheduler.policy),
        report=PolicyLog(),
        **config.scheduler.model_dump(
            exclude={"n_slots", "max_waiting", "max_waiting_tokens", "policy"}
        ),
    )


def make_cache(config: CacheConfig, kind: SnapshotKind) -> PrefixCache | None:
    """None if nothing is to be reused."""
    if config.mode == "off":
        return None
    return PrefixCache(
        kind,
        max_bytes=config.max_bytes,
        max_entries=config.max_entries if config.mode == "snapshots" else 0,
    )


def open_store(
    model: Model,
    files: tuple[ModelFile, ...],
    config: EngineConfig,
    fields: Mapping[str, object],
) -> DiskStore | None:
    """
    The states that earlier processes kept of *model*, used like this; None: none.

    Raises:
        ConfigError: the directory cannot be used.
        Unsupported: libllama is too old for files that others may have forged.
    """
    cache = config.cache
    # Nobody asks for files, or there is no room for one.
    if cache.mode == "off" or cache.directory is None:
        return None
    if cache.max_disk_bytes <= INDEX_BYTES:
        return None
    name = state_name(model, files, config, fields)
    if name is None:  # no file says what model this is
        warnings.warn(
            f"{model.path} has changed since it was loaded: "
            f"CacheConfig.directory={str(cache.directory)!r} is not used",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    from pyllama_raw.engine.disk_store import (
        DiskStore,  # SQLite: few engines have files
    )

    return DiskStore(Path(cache.directory), name, cache.max_disk_bytes)


def state_name(
    model: Model,
    files: tuple[ModelFile, ...],
    config: EngineConfig,
    fields: Mapping[str, object],
) -> str | None:
    """
    The name of states of *model*, used like this. None: its files are others by now.

    Raises:
        Unsupported: libllama is too old for files that others may have forged.
    """
    check_states_of_files()
    if files and model_files(Path(model.path)) == files:
        with suppress(OSError):
            made_with = config.model.loading
            return fingerprint(files, model.size_bytes, made_with, fields)
    return None


def make_disk_tier(
    store: DiskStore, kind: SnapshotKind, cost: SnapshotCost, keys: SpanKeys
) -> Tier:
    """A file holds a whole state, also where host snapshots are ranges."""
    cache = PrefixCache(kind.whole, max_bytes=store.max_bytes, max_entries=MAX_FILES)

    def bound(n_tokens: int) -> int:
        # Ranges are written in parts, each with a head of its own.
        n_parts = n_parts_of(n_tokens) if kind is SnapshotKind.RANGE else 1
        n_more = head_bytes(n_parts) + (n_parts - 1) * cost.base_bytes
        return ENTRY_BYTES + n_more + cost.bound(n_tokens)

    return Tier(CacheTier.DISK, cache, bound, store.scan(keys))
