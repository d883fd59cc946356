"""Owners of the kernels that compute a model with some options, as a short decode tells."""

from __future__ import annotations

from pyllama_raw.engine.build import context_fields
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.kernels import Watch
from pyllama_raw.native.libllama import check_decode, last_error
from pyllama_raw.native.model import Model
from pyllama_raw.options.config import EngineConfig


def kernels_used(model: Model, config: EngineConfig) -> str:
    """
    Name them for attention and for each type of weights: "attention ours; q4_1 AMX 97.0%".

    Numbers are shares of all multiply-adds with weights. Two tokens are decoded, because some
    kernels of ours leave products with a single one to libllama.
    """
    wanted = config.resolved_context
    fields = context_fields(wanted, 1, model.n_ctx_train)
    fields |= {"n_outputs_max": 2, "deterministic": config.deterministic}
    watch = Watch()
    with Context(model, n_seq_max=1, watch=watch, **fields) as context:
        batch = Batch(context.max_tokens)
        if model.reads_sources:  # decodes need one
            batch.add_scored([0], 0, 0)
            check_decode(context.read_sources(batch).code, last_error())
            batch.clear()
        tokens = range(min(2, context.max_tokens))
        batch.add_rows([0 for _ in tokens], list(tokens), [0 for _ in tokens])
        context.decode(batch)
        products, attentions = watch.products, ", ".join(watch.attentions)
    n_all = sum(n for counts in products.values() for n in counts.values())
    parts = [f"attention {attentions}"] if attentions else []
    for name, counts in products.items():
        shares = (f"{whose} {n / n_all:.1%}" for whose, n in counts.items())
        parts.append(f"{name} {', '.join(shares)}")
    return "; ".join(parts)
