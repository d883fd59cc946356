"""What options came to: the description of an engine, and sizes that libllama changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from logging import getLogger

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.engine.info import EngineInfo, SpecialToken, VocabInfo
from pyllama_raw.native import libllama
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.options.chat_templates import ChatTemplate
from pyllama_raw.options.config import ContextConfig, EngineConfig
from pyllama_raw.options.version import __version__

_REASONS = {
    "n_ctx": "libllama rounds cells up to multiples of 256, or of 256 a slot",
    "n_batch": "a step has at most n_ctx tokens",
    "n_ubatch": "a graph has at most the tokens of a step",
    "n_outputs_max": "a step has at least a row for each sequence, at most n_batch",
}

_log = getLogger(__name__)


def describer(
    context: Context,
    config: EngineConfig,
    limits: ContextLimits,
    template: ChatTemplate | None = None,
) -> Callable[[], EngineInfo]:
    """Keep what can be said at once: the context may be closed when somebody asks."""
    wanted, model = config.resolved_context, context.model
    taken = context.kernels.taken if context.kernels is not None else ()
    known = partial(
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
        n_threads=wanted.threads,
        n_threads_batch=wanted.n_threads_batch or wanted.threads,
        type_k=wanted.type_k,
        type_v=wanted.type_v,
        flash_attn=wanted.flash_attn,
        kv_unified=limits.unified,
        can_cut=limits.kind.can_cut,
        kernels={row.computes: row.needs for row in taken},
        config=config,
        chat_template=None if template is None else template.source,
    )

    def describe() -> EngineInfo:
        # Not the metadata of the distribution: a copied folder or a frozen program has none.
        theirs = libllama.llama_version()
        devices = config.model.devices or [d.name for d in libllama.devices()]
        return known(
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


def tell_changes(asked: ContextConfig, context: Context) -> None:
    """A warning for each size that somebody chose and that is another one."""
    for name, reason in _REASONS.items():
        wanted, found = getattr(asked, name), getattr(context, name)
        if name in asked.model_fields_set and wanted not in (None, found):
            _log.warning("%s=%d is made %d: %s", name, wanted, found, reason)
