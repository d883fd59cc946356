"""
From options to a context: its sequences, sizes and limits, what probes of it tell, a description.

An estimate asks the same functions as an engine that is opened.

Probes find what the memory of a context can do, what a snapshot of it costs, and whether libllama
computes the model at all. A short decode tells. It runs in one thread, where an assertion of
libllama that fails is an error, and it brings the weights into memory before the first request.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from math import inf, isfinite
from time import perf_counter
from typing import Any, TypeAlias

from pyllama_raw.core.costs import CopyPrice
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.engine.info import (
    EngineInfo,
    ModelClass,
    ModelInfo,
    SpecialToken,
    VocabInfo,
)
from pyllama_raw.errors import ConfigError, DecodeFailed, ModelLoadFailed, Unsupported
from pyllama_raw.native import libllama
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import EXCEPTION, check_decode, last_error, new_bytes
from pyllama_raw.native.model import Model
from pyllama_raw.options import __version__
from pyllama_raw.options.chat_templates import ChatTemplate
from pyllama_raw.options.config import CacheConfig, ContextConfig, EngineConfig

SLACK_BYTES = 256  # of a snapshot's head, which may differ a little by slot
MAX_COPIES = 20  # of a slot, to time one
MAX_COPIES_S = 0.2  # in all, after which no other copy is timed
MUCH_CLOSER = 4.0  # a row that is another one by mistake differs from it in digits only
MAX_BESIDE = 8  # sequences that are computed beside each other
# Of the distance between rows of other tokens: rows of one sequence in batches of one shape are
# no further apart. On CPUs they are equal; mixed states of small plamo2 come to 0.015 to 0.3.
SAME_SHAPE = 0.003

Row: TypeAlias = "array[float]"


def expected_kind(model: Model, context: ContextConfig) -> SnapshotKind:
    """
    Kind that the facts of *model* state; recurrent state and windows are of use whole.

    That holds with swa_full too: libllama fills cells behind the window again when it
    needs some, and never saves them.
    """
    if model.is_recurrent or model.is_hybrid or model.n_swa > 0:
        return SnapshotKind.EXACT
    return SnapshotKind.RANGE if context.kv_unified else SnapshotKind.STATE


def measure(context: Context) -> SnapshotCost:
    """
    Measure what a snapshot of *context* costs, which is empty before and after, without lanes.

    Raises:
        ModelLoadFailed: libllama cannot compute the model.
        Unsupported: it computes the model wrongly, as its architecture is used here.
    """
    model = context.model
    with context.one_thread(), blaming(model):
        # What a snapshot costs, and whether rows are those of their tokens.
        cost = _compute(context)
        context.clear()
        if model.is_recurrent or model.is_hybrid:
            _check_sequences(context)
    return cost


@contextmanager
def blaming(model: Model) -> Iterator[None]:
    """A decode that fails by an assertion is the fault of *model*."""
    try:
        yield
    except DecodeFailed as error:
        if error.returned != EXCEPTION:
            raise
        message = f"libllama cannot compute this model: {error}"
        raise ModelLoadFailed(model.path, message) from error


def _compute(context: Context) -> SnapshotCost:
    """Two tokens, and three in another slot: one decode, if all find room in it."""
    # One decode is the usual case; a context of one slot or a few tokens needs several.
    fits = context.n_seq_max > 1 and context.max_tokens >= 5
    compute = _at_once if fits and context.n_outputs_max > 2 else _one_by_one
    cost, rows = compute(context, some_tokens(context))
    first, second, middle = rows
    # The row in the middle of a prompt must be that of its second token.
    if MUCH_CLOSER * _distance(middle, first) < _distance(middle, second):
        raise _unsupported(context, "gives out wrong rows of a prompt")
    return cost


def _at_once(context: Context, tokens: list[int]) -> tuple[SnapshotCost, list[Row]]:
    batch = Batch(5)
    batch.add_scored(tokens[:2], 0, 0)
    batch.add(tokens[:2], 0, 1, True)
    batch.add(tokens[2:], 2, 1, False)
    context.decode(batch)
    rows = [context.logits(place) for place in (0, 1, 3)]
    cost = cost_of(2, context.state_bytes(0), context.state_bytes(1))
    return replace(cost, price=_price(context)), rows


def _price(context: Context) -> CopyPrice:
    """
    Price of copies of slots 0 and 1, which hold two and three tokens in a run of cells each.

    Slot 0 then gets a cell of slot 1, too: that is the same number of cells in two runs. Without
    a pool for all slots cells of a slot always lie in one run.
    """
    base_s = _capture_s(context, 0)
    longer_s = _capture_s(context, 1)
    has_runs = context.kv_unified and not context.model.is_recurrent
    state = new_bytes(context.state_bytes(0))
    context.capture(0, state)
    runs_s = longer_s
    if has_runs:
        # A cell from behind that of the other slot makes a second run.
        context.seq_cp(1, 0, 2, 3)
        runs_s = _capture_s(context, 0)
    return CopyPrice(
        base_s,
        max(runs_s - longer_s, 0.0),
        max(longer_s - base_s, 0.0),
        _least_s(lambda: context.restore(0, state)),
    )


def _capture_s(context: Context, slot: int) -> float:
    state = new_bytes(context.state_bytes(slot))
    return _least_s(lambda: context.capture(slot, state))


def _least_s(copy: Callable[[], object]) -> float:
    """Seconds that *copy* takes at the best of many: on a busy machine most take longer."""
    least_s, spent_s = inf, 0.0
    for _ in range(MAX_COPIES):
        started = perf_counter()
        copy()
        took_s = perf_counter() - started
        least_s, spent_s = min(least_s, took_s), spent_s + took_s
        if spent_s > MAX_COPIES_S:
            break
    return least_s


def _one_by_one(context: Context, tokens: list[int]) -> tuple[SnapshotCost, list[Row]]:
    batch = Batch(2)
    n_bytes, rows = [], []
    for pos in range(2):
        batch.clear()
        batch.add(tokens[pos : pos + 1], pos, 0, True)
        context.decode(batch)
        n_bytes.append(context.state_bytes(0))
        rows.append(context.logits(0))
    # There is no second slot to compare with, but the least that a copy takes.
    base_s = _capture_s(context, 0)
    cost = replace(cost_of(1, *n_bytes), price=CopyPrice(base_s, restore_s=base_s))
    if context.max_tokens < 2:  # no prompt is ever computed in chunks
        return cost, [rows[0], rows[1], rows[1]]
    context.clear()
    batch.clear()
    batch.add(tokens[:2], 0, 0, True)
    context.decode(batch)
    return cost, [*rows, context.logits(1)]


def cost_of(n_tokens: int, n_bytes: int, one_more: int) -> SnapshotCost:
    """Cost by slots that hold *n_tokens*, and one more."""
    token_bytes = one_more - n_bytes
    head_bytes = max(n_bytes - n_tokens * token_bytes, 0)
    return SnapshotCost(head_bytes + SLACK_BYTES, token_bytes)


def _check_sequences(context: Context) -> None:
    """
    The rows of a sequence must not depend on what its neighbours are.

    Some architectures put the recurrent states of a batch where those of others are. That may
    weigh little. Therefore the sequence is computed twice in batches of the same shape, where
    kernels add in the same order: once beside neighbours with tokens like its own, which hide
    such a mistake, and once beside others.
    """
    max_tokens = context.max_tokens
    n_first = 2 if max_tokens >= 4 else 1  # tokens of each sequence in the first batch
    n_slots = min(context.n_seq_max, MAX_BESIDE, max_tokens // n_first)
    if n_slots < 2:
        return
    slots = range(context.n_seq_max - n_slots, context.n_seq_max)
    last = slots[-1]
    try:
        # The same sequence alone, in another slot, and beside equal and other neighbours.
        alone = _rows_of_last(context, {last: 0}, n_first)
        elsewhere = _rows_of_last(context, {0: 0}, n_first)
        beside_equals = _rows_of_last(context, dict.fromkeys(slots, 0), n_first)
        strangers = {slot: (last - slot) % 3 for slot in slots}
        beside_others = _rows_of_last(context, strangers, n_first)
    except DecodeFailed as error:
        raise _unsupported(
            context, "fails with several sequences: n_slots=1 works"
        ) from error
    # How far rows of other tokens are from each other, and how far rounding moves a row.
    scale = _far(alone[:-1], alone[1:])
    rounding = _far(alone, elsewhere)
    # Its rows look like those of other tokens, or move more than rounding moves them.
    is_other = MUCH_CLOSER * _far(alone, beside_others) > scale
    allowed = max(MUCH_CLOSER * rounding, SAME_SHAPE * scale)
    if is_other or _far(beside_equals, beside_others) > allowed:
        raise _unsupported(context, "mixes sequences: give n_slots=1")


def _rows_of_last(context: Context, begins: dict[int, int], n_first: int) -> list[Row]:
    """
    The rows of the last slot in a few decodes of all slots, of which nothing is left.

    Mistakes add up from one decode to the next. The last one has fewer slots, because an
    architecture may be wrong for some numbers of sequences only.

    Args:
        begins: by slot, which of some_tokens() comes first; they follow each other in turn.
        n_first: tokens of each slot in the first decode; later ones have one.
    """
    tokens = some_tokens(context)
    last = max(begins)
    rows, pos = [], 0
    # The last decode has three slots only.
    for n_tokens, n_beside in ((n_first, 0), (1, 0), (1, 0), (1, -3)):
        batch = Batch(context.max_tokens)
        for slot in sorted(begins)[n_beside:]:
            run = [tokens[(begins[slot] + pos + i) % 3] for i in range(n_tokens)]
            batch.add(run, pos, slot, slot == last)
        context.decode(batch)
        rows.append(context.logits(batch.n_tokens - 1))
        pos += n_tokens
    context.clear()
    return rows


def _far(rows: list[Row], reference: list[Row]) -> float:
    """The mean distance of *rows* from *reference*, one by one."""
    pairs = zip(rows, reference, strict=True)
    return sum(_distance(row, other) for row, other in pairs) / len(rows)


def _unsupported(context: Context, fault: str) -> Unsupported:
    name = context.model.meta.get("general.architecture", "")
    return Unsupported(
        "generation",
        f"libllama does not compute the architecture {name!r} rightly: it {fault}",
    )


def some_tokens(context: Context) -> list[int]:
    """Three tokens from the middle of the vocabulary: those at its ends may mean nothing."""
    n_vocab = context.model.n_vocab
    return [n_vocab // 3, n_vocab // 2, n_vocab * 2 // 3]


def _distance(row: Row, other: Row) -> float:
    """Distance by a few hundred numbers; not a number if one is none."""
    step = len(row) // 256 + 1
    return sum(abs(x - y) for x, y in zip(row[::step], other[::step], strict=False))


def slot_cost(context: Context) -> SnapshotCost:
    """
    What a slot of *context* costs, by a few decodes; raises as measure() and measure_sources() do.

    Raises:
        Unsupported: the model keeps no memory of its texts.
    """
    if not context.has_memory:
        raise Unsupported("generate", "the model keeps no memory of its texts")
    start = decoder_start(context.model)
    return measure(context) if start is None else measure_sources(context, start)


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
        # Each decode needs the sources of all slots read before it.
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


MAX_SEQS = 256  # llama.cpp: LLAMA_MAX_SEQ
DEFAULT_OUTPUTS = 32  # rows a step: more make scores of prompts faster, and cost memory
DEFAULT_CTX_SLOT = 2048  # tokens a slot, unless the model was trained on fewer
MAX_TEXTS = 64  # of a step
DEFAULT_CTX = 8192  # tokens of a text that is computed in parts
# libllama has a graph of their heads, and their memory can forget tokens, as wrong drafts.
HEADED = ("deepseek2", "glm4moe", "hy_v3")
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
    if config.speculation.mode == "mtp" and (reason := _without_heads(info)):
        raise ConfigError(
            f"speculation.mode='mtp': {reason}: give mode='draft' and a draft model, or 'lookup'"
        )
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


def _without_heads(info: ModelInfo) -> str:
    """Why heads of the model of *info* make no drafts; empty: they do."""
    if info.n_layer_nextn == 0:
        return "n_layer_nextn is 0, so no head of it predicts further tokens"
    if info.architecture not in HEADED:
        allowed = ", ".join(HEADED)
        return f"heads of {info.architecture!r} are not used, only those of {allowed}"
    if info.n_layer_nextn >= info.n_layer:
        return f"all of {info.n_layer} layers are heads (n_layer_nextn)"
    return ""


def speculation_of(
    model: Model, config: EngineConfig, kind: SnapshotKind, coupling: str = ""
) -> str:
    """
    The source of drafts, or "off", with the reason if the options do not say so.

    Args:
        coupling: why a row depends on those beside it, which "auto" does not allow; empty: none
            does.
    """
    mode = config.speculation.mode
    if mode == "off":
        return mode
    if model.reads_sources:
        return f"off: {BY_ENCODER}"
    if not kind.can_cut:
        return "off: the memory of the model cannot forget tokens, as drafts that are wrong"
    if mode != "auto":
        return mode
    if config.deterministic is True:
        return "off: deterministic is True"
    if config.sampler_placement == "backend":
        return "off: sampler_placement is backend"
    if coupling:
        return f"off: drafts could change last digits: {coupling}"
    return "lookup"


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
    speculation: str = "off",
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
        speculation=speculation,
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
