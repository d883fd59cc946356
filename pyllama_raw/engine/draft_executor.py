"""
A draft model: a second, smaller model whose next tokens are drafts for the first one.

1. Both have one vocabulary, or the engine does not open. The file may be of another size at its end.
2. Its context has the slots of the engine. What each holds is the scheduler's to know: a work says
   from where on a slot is to be filled again. A slot that holds less, because the context is
   another one or has failed, has its work answered with Lost().
3. A step is a decode of what slots lack, and one for each further draft. The shim begins each of
   them ahead, so Python is in none. Tokens are the likeliest ones, and come with their probability.
4. Whatever fails loses slots, or the context, which the next step makes anew. No request ends.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger
from math import exp
from typing import Any

from pyllama_raw.core.scheduling.speculation import DraftLimits
from pyllama_raw.core.step import (
    Computed,
    DecodeStatus,
    Lost,
    Output,
    Propose,
    Proposed,
    StepPlan,
    StepResult,
)
from pyllama_raw.engine.info import Operation, capabilities_of, model_info
from pyllama_raw.engine.layout import context_fields, expected_kind
from pyllama_raw.engine.mailbox import AbortGate
from pyllama_raw.engine.shared_models import ModelUse, open_model
from pyllama_raw.errors import ConfigError, DecodeAborted, NativeError, NoKVSpace
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import AbortFlag, Context
from pyllama_raw.native.libllama import decode_error, last_error, pass_on_lines
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowLogprobs, RowSampler, RowSamplers
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.options.config import ContextConfig, DraftConfig, EngineConfig
from pyllama_raw.options.models import resolve_model

N_BATCH = 512  # tokens of a step
MAX_MORE = 128  # tokens that one of two equal vocabularies may have at its end
# Options of the context of the first model that say nothing of another one.
OF_MODEL = ("rope", "yarn")

_log = getLogger(__name__)


class DraftExecutor:
    """Runs steps of a draft model. Thread: the engine's."""

    def __init__(
        self, use: ModelUse, n_vocab: int, n_seq_max: int, **fields: Any
    ) -> None:
        """
        Args:
            n_vocab: ids below it are of both vocabularies.
            fields: of its context, see draft_fields().

        Raises:
            ContextFailed, NativeError: *use* is left to the caller.
        """
        self.flag = AbortFlag()
        self.decode_ns = self.cpu_ns = 0
        self._use, self._n_seq_max, self._fields = use, n_seq_max, fields
        self._context: Context | None = None
        self._slots = dict.fromkeys(range(n_seq_max))  # in the order of their use
        context = self._ready()
        self.limits = DraftLimits(
            n_ctx_slot=min(context.n_ctx_seq, use.model.n_ctx_train),
            n_cells=context.n_ctx,
            n_batch=context.max_tokens,
            n_vocab=n_vocab,
        )
        self._batch = Batch(context.max_tokens)
        self._samplers = RowSamplers(n_seq_max)
        # Samplers of rows: each has the place where its probability is written.
        self._rows: list[tuple[RowSampler, RowLogprobs]] = []
        for _ in range(n_seq_max):
            sampler, row = RowSampler(), RowLogprobs(0)
            sampler.watch(row)
            self._rows.append((sampler, row))

    def _ready(self) -> Context:
        """The context, which is made anew if there is none. Raises ContextFailed, NativeError."""
        if self._context is None:
            self._context = Context(
                self._use.model,
                n_seq_max=self._n_seq_max,
                abort=self.flag,
                **self._fields,
            )
        return self._context

    def execute(
        self,
        plan: StepPlan,
        move: Callable[[StepPlan], StepResult],
        gate: AbortGate,
    ) -> StepResult:
        """
        Have the first model *move* what *plan* moves, then compute its works.

        What fails of the works comes back as Lost() outputs.
        """
        result = move(plan._replace(works=())) if plan.moves else StepResult()
        if result.status is not DecodeStatus.OK:
            return result
        gate.enter(plan.works, self.flag)
        try:
            drafted = self._propose(plan)
        finally:
            gate.leave()
        return result._replace(
            outputs=drafted.outputs,
            error=drafted.error,
            draft_s=drafted.draft_s,
            decode_s=drafted.decode_s,
        )

    def _propose(self, plan: StepPlan) -> StepResult:
        works = [work for work in plan.works if type(work) is Propose]
        assert len(works) == len(plan.works)
        error: NativeError | None = None
        try:
            return self._run(works, self._ready())
        # Nobody wants it any more, so nothing has failed.
        except DecodeAborted:
            self._clear()
        # The context can go on, with fewer tokens.
        except NoKVSpace as failure:
            self._clear()
            error = failure
        except NativeError as failure:
            self.suspend()
            error = failure
        if error is not None:
            pass_on_lines()
            _log.warning("the draft model failed, requests go on without: %s", error)
        return StepResult(outputs=(Lost(),) * len(works), error=error)

    def _run(self, works: list[Propose], context: Context) -> StepResult:
        batch, depth, lost = self._batch, works[0].n_drafts, set[int]()
        batch.clear()
        self._make_room(works, context)
        for work in works:
            highest = context.seq_pos_max(work.slot)
            n_held = 0 if highest is None else highest + 1
            if n_held < work.pos:
                lost.add(work.slot)
                context.seq_rm(work.slot)
            else:
                context.cut(work.slot, work.pos)
                batch.add(work.tokens, work.pos, work.slot, depth > 0)
        rows = self._rows[: batch.n_rows]
        self._samplers.set_all([sampler for sampler, _ in rows])
        drafts: list[list[tuple[int, float]]] = [[] for _ in rows]
        seconds = []
        for n_left in range(max(depth, 1) if batch.n_tokens else 0, 0, -1):
            outcome = context.step(batch, self._samplers, ahead=n_left > 1)
            if outcome.code:
                raise decode_error(outcome.code, last_error(), "llama_decode")
            seconds.append((outcome.decode_ns + outcome.sample_ns) / 1e9)
            self.decode_ns += outcome.decode_ns
            self.cpu_ns += outcome.cpu_ns
            # A row without numbers has no token, and so none after it.
            if outcome.codes:
                break
            for draft, token, (_, row) in zip(
                drafts, outcome.tokens, rows, strict=True
            ):
                draft.append((token, exp(row.value)))
        pairs = iter(drafts)
        outputs = [
            Lost() if work.slot in lost else _output(next(pairs, []), depth)
            for work in works
        ]
        return StepResult(
            outputs=tuple(outputs), draft_s=tuple(seconds), decode_s=sum(seconds)
        )

    def _make_room(self, works: list[Propose], context: Context) -> None:
        """Empty slots of no work, the one that was used longest ago first, if cells are short."""
        for work in works:
            del self._slots[work.slot]
            self._slots[work.slot] = None
        highest = {slot: context.seq_pos_max(slot) for slot in self._slots}
        n_held = {slot: pos + 1 for slot, pos in highest.items() if pos is not None}
        n_cells = sum(n_held.values())
        n_cells += sum(len(work.tokens) + work.n_drafts for work in works)
        used = {work.slot for work in works}
        for slot in [slot for slot in n_held if slot not in used]:
            if n_cells <= context.n_ctx:
                break
            context.seq_rm(slot)
            n_cells -= n_held[slot]

    def _clear(self) -> None:
        if self._context is not None:
            self._context.drop()
            self._context.clear()

    def suspend(self) -> None:
        """Free the context; the next step makes another one."""
        context, self._context = self._context, None
        if context is not None:
            context.drop()
            context.close()

    def rebuild(self) -> None:
        """Have the next step make another context."""
        self.suspend()

    def shutdown(self) -> None:
        """Free all of it; no call may follow."""
        self.suspend()
        for sampler, _ in self._rows:
            sampler.close()
        self._use.close()


def _output(drafts: list[tuple[int, float]], depth: int) -> Output:
    if not depth:
        return Computed()
    tokens = [token for token, _ in drafts]
    return Proposed(tuple(tokens), tuple(chance for _, chance in drafts))


def draft_fields(config: EngineConfig, n_ctx: int, n_seq_max: int) -> dict[str, Any]:
    """Arguments of the context of a draft model, beside one with *n_ctx* cells."""
    fields = context_fields(config.resolved_context, n_seq_max, n_ctx)
    usual = context_fields(ContextConfig(n_threads=1), n_seq_max, n_ctx)
    n_batch = max(N_BATCH, n_seq_max)
    return (
        fields
        | {name: usual[name] for name in fields if name.startswith(OF_MODEL)}
        | {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_batch}
        | {"n_outputs_max": n_seq_max, "kv_unified": True}
    )


def open_drafts(
    config: EngineConfig, model: Model, n_ctx: int, n_seq_max: int
) -> DraftExecutor:
    """
    Load the draft model of *config*, beside *model*, whose context has *n_ctx* cells.

    Raises:
        ConfigError: they have two vocabularies, or it cannot make drafts.
        ModelNotFound, ModelLoadFailed, ContextFailed: it cannot be had.
    """
    draft = config.speculation.draft_model
    assert draft is not None
    use = open_model(resolve_model(draft.path), draft.opening)
    try:
        _check_pair(model, use.model, draft)
        n_vocab = min(model.vocab.n_tokens, use.model.vocab.n_tokens)
        fields = draft_fields(config, n_ctx, n_seq_max)
        return DraftExecutor(use, n_vocab, n_seq_max, **fields)
    except BaseException:
        use.close()
        raise


def _check_pair(model: Model, second: Model, draft: DraftConfig) -> None:
    if reason := _unfit(second) or difference(model.vocab, second.vocab):
        raise ConfigError(
            f"speculation.draft={str(draft.path)!r}: {reason}: give a model with the "
            f"vocabulary of {model.path}, or leave it out"
        )


def _unfit(model: Model) -> str:
    """Why *model* makes no drafts; empty: it does."""
    if model.reads_sources:
        return "it reads prompts with an encoder"
    # Encoders, and models that make no text token by token, have no memory of what they read.
    refusals = capabilities_of(model_info(model.path, model.header)).refusals
    if reason := refusals.get(Operation.GENERATE):
        return reason.partition(":")[0]
    if not expected_kind(model, ContextConfig()).can_cut:
        return "its memory cannot forget tokens, as drafts that are wrong"
    return ""


def difference(vocab: Vocab, other: Vocab) -> str:
    """What the vocabulary *other* has otherwise than *vocab*; empty: they are equal."""
    if vocab.kind != other.kind:
        return f"its vocabulary is of the kind {other.kind}, not {vocab.kind}"
    n_tokens, n_others = vocab.n_tokens, other.n_tokens
    if abs(n_tokens - n_others) > MAX_MORE:
        return f"its vocabulary has {n_others} tokens, not {n_tokens}"
    for name in ("bos", "eos", "add_bos", "add_eos"):
        value, first = getattr(other, name), getattr(vocab, name)
        if value != first:
            return f"its vocabulary has {name}={value}, not {first}"
    n_both = min(n_tokens, n_others)
    pieces, other_pieces = vocab.pieces, other.pieces
    for token in range(n_both):
        piece, other_piece = pieces[token], other_pieces[token]
        # A control token has a name only.
        if not (piece or other_piece):
            piece = vocab.piece(token, special=True)
            other_piece = other.piece(token, special=True)
        if piece != other_piece:
            return f"its token {token} is {other_piece!r}, not {piece!r}"
    return ""
