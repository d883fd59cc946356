"""
A draft model: a second, smaller model whose next tokens are drafts for the first one; or heads of
the first one itself, which predict several tokens (multi-token prediction, MTP).

1. Both have one vocabulary, or the engine does not open. The file may be of another size at its end.
2. Its context has the slots of the engine. What each holds is the scheduler's to know: a work says
   from where on a slot is to be filled again. A slot that holds less, because the context is
   another one or has failed, has its work answered with Lost().
3. A step is a decode of what slots lack, and one for each further draft. The shim begins each of
   them ahead, so Python is in none. Tokens are the likeliest ones, and come with their probability.
4. Whatever fails loses slots, or the context, which the next step makes anew. No request ends.
5. Heads have a second context of the model, with cells of their own. The cell of a token needs the
   hidden state that the model had of the token before it, and only a step of the model leaves that.
   So heads follow the first context: they take in tokens and states of each step, and do with their
   slots what a move does with those of the model. No slot of theirs ever holds another text.
6. What they take in becomes cells when drafts are wanted, or once N_BATCH tokens have come.
7. A prefix that comes out of a snapshot brings no states. Heads begin behind it, with zeros in place of
   the first state: that costs right drafts and nothing else. So it is after a shift or a sleep.
8. Of several heads the first one makes all drafts, each from its own state before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from logging import getLogger
from math import exp, isnan
from typing import Any

from pyllama_raw.core.scheduling.speculation import DraftLimits
from pyllama_raw.core.step import (
    Computed,
    Copy,
    DecodeStatus,
    Load,
    Lost,
    Move,
    Output,
    PrefillSpan,
    Propose,
    Proposed,
    ReadSource,
    Release,
    Sampled,
    Shift,
    StepPlan,
    StepResult,
    Trim,
    Verify,
    Work,
)
from pyllama_raw.engine.info import Operation, capabilities_of, model_info
from pyllama_raw.engine.layout import (
    blaming,
    context_fields,
    expected_kind,
    some_tokens,
)
from pyllama_raw.engine.mailbox import AbortGate
from pyllama_raw.engine.rows import Rows
from pyllama_raw.engine.shared_models import ModelUse, open_model
from pyllama_raw.errors import ConfigError, DecodeAborted, NativeError, NoKVSpace
from pyllama_raw.native.batch import Batch, HiddenBatch
from pyllama_raw.native.context import AbortFlag, Context, StepOutcome
from pyllama_raw.native.libllama import (
    decode_error,
    last_error,
    need,
    pass_on_lines,
)
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
        n_more = {work.slot: len(work.tokens) + work.n_drafts for work in works}
        self._make_room(n_more.keys(), n_more, context)
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
                draft.append((token, _chance(row.value)))
        pairs = iter(drafts)
        outputs = [
            Lost() if work.slot in lost else _output(next(pairs, []), depth)
            for work in works
        ]
        return StepResult(
            outputs=tuple(outputs), draft_s=tuple(seconds), decode_s=sum(seconds)
        )

    def _make_room(
        self, used: Collection[int], n_more: Mapping[int, int], context: Context
    ) -> list[int]:
        """
        Have cells for *n_more* tokens, by slot.

        Returns slots that are empty for that, the one that was used longest ago first, and none
        that is *used* now.
        """
        for slot in used:
            del self._slots[slot]
            self._slots[slot] = None
        highest = {slot: context.seq_pos_max(slot) for slot in self._slots}
        n_held = {slot: pos + 1 for slot, pos in highest.items() if pos is not None}
        n_cells = sum(n_held.values()) + sum(n_more.values())
        emptied = []
        for slot in [slot for slot in self._slots if slot not in used]:
            if n_cells <= context.n_ctx:
                break
            context.seq_rm(slot)
            n_cells -= n_held.get(slot, 0) + n_more.get(slot, 0)
            emptied.append(slot)
        return emptied

    def move(self, moves: Iterable[Move]) -> None:
        """Hear which *moves* slots of the first model make: heads follow them, a draft model does not."""

    def follow(
        self,
        works: tuple[Work, ...],
        outputs: Iterable[Output],
        rows: Rows,
        model: Context,
    ) -> None:
        """
        Hear of a step of the first model that worked: heads take it in, a draft model does not.

        Args:
            rows: of the step, which have the place of each work in its batch.
            model: the context of the first model, which has the hidden states.
        """

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


class Trail:
    """Tokens that follow what the cells of a slot hold, with their states: no cells as yet."""

    __slots__ = ("hidden", "last", "pos", "tokens")

    def __init__(self, pos: int, last: bytes) -> None:
        self.pos = pos  # of tokens[0]; cells hold what is before
        self.tokens = array("i")
        self.hidden = bytearray()  # of the token before each
        self.last = last  # of the last token

    @property
    def end(self) -> int:
        """The position behind it, of which the token is not known."""
        return self.pos + len(self.tokens)

    def first(self, n_pos: int, unknown: bytes) -> Trail:
        """What is left of it in a slot that holds the first *n_pos* positions only."""
        size, n_left = len(unknown), max(n_pos - self.pos, 0)
        # The state before the first token that goes, if that was no cell.
        last = self.hidden[n_left * size : (n_left + 1) * size]
        if n_pos == self.end:
            last = bytearray(self.last)
        is_known = last and n_pos >= self.pos
        left = Trail(min(self.pos, n_pos), bytes(last) if is_known else unknown)
        left.tokens = self.tokens[:n_left]
        left.hidden = self.hidden[: n_left * size]
        return left


class HeadExecutor(DraftExecutor):
    """Runs steps of the heads of a model, and follows those of the model. Thread: the engine's."""

    def __init__(self, use: ModelUse, n_seq_max: int, **fields: Any) -> None:
        """
        Args:
            fields: of its context, see head_fields().

        Raises:
            ContextFailed, NativeError, ModelLoadFailed: *use* is left to the caller.
        """
        self._trails: dict[int, Trail] = {}  # by slot
        super().__init__(use, use.model.n_vocab, n_seq_max, **fields)
        self.limits = replace(self.limits, of_heads=True)
        context = self._ready()
        self._unknown = bytes(context.hidden_bytes)  # a state
        self._states = HiddenBatch(context.max_tokens, use.model.n_embd_out)
        # A failed assertion of libllama is an error here, and ends the process elsewhere.
        tokens = some_tokens(context)[:2]
        self._states.add_hidden(tokens, 0, 0, 2 * self._unknown, True)
        with context.one_thread(), blaming(use.model):
            context.decode(self._states)
        context.clear()
        self._states.clear()

    def _ready(self) -> Context:
        is_new = self._context is None
        context = super()._ready()
        if is_new:
            context.keep_hidden(of_rows=True)
        return context

    def move(self, moves: Iterable[Move]) -> None:
        """Do with slots what *moves* do with those of the model."""
        for move in moves:
            match move:
                # What is put together of other parts has no states.
                case Release(slot) | Shift(slot) | Load(slot):
                    self._cut(slot, 0)
                case Trim(slot, n_pos):
                    self._cut(slot, n_pos)
                case Copy(src, dst, n_pos):
                    self._copy(src, dst, n_pos)

    def follow(
        self,
        works: tuple[Work, ...],
        outputs: Iterable[Output],
        rows: Rows,
        model: Context,
    ) -> None:
        """Take in tokens and hidden states of the step."""
        # It failed, and the next proposal makes it anew.
        if self._context is None:
            return
        size = len(self._unknown)
        starts = rows.starts(works)
        for work, output, start in zip(works, outputs, starts, strict=True):
            slot, pos, n_held = work.slot, work.pos, _n_held(work, output)
            del self._slots[slot]
            self._slots[slot] = None
            # Rows of images are no tokens.
            if not n_held:
                self._cut(slot, 0)
                continue
            trail = self._trails.get(slot)
            # It went on elsewhere, as after a step that failed.
            if trail is None or trail.end != pos:
                trail = self._cut(slot, pos)
            states = model.hidden(start, start + n_held)
            trail.tokens += work.tokens[:n_held]
            trail.hidden += trail.last + states[:-size]
            trail.last = states[-size:]
        if sum(len(trail.tokens) for trail in self._trails.values()) >= N_BATCH:
            self._catch_up(self._context)

    def _cut(self, slot: int, n_pos: int) -> Trail:
        """Have *slot* hold the first *n_pos* positions at most, and go on behind them."""
        trail, left, n_cells = self._trails.get(slot), Trail(n_pos, self._unknown), 0
        if trail is not None and trail.end >= n_pos:
            left = trail.first(n_pos, self._unknown)
            n_cells = left.pos
        if self._context is not None:
            self._context.cut(slot, n_cells)
        self._trails[slot] = left
        return left

    def _copy(self, src: int, dst: int, n_pos: int) -> None:
        trail, context = self._trails.get(src), self._context
        self._cut(dst, 0)
        # A copy shares cells, so what was taken in becomes cells first.
        if context is not None and trail is not None and trail.pos < n_pos:
            self._catch_up(context)
        trail, context = self._trails.get(src), self._context
        if context is None or trail is None or trail.end < n_pos:
            return
        context.seq_cp(src, dst, 0, n_pos)
        self._trails[dst] = trail.first(n_pos, self._unknown)

    def _catch_up(self, context: Context) -> None:
        """Make cells of all that was taken in."""
        try:
            self._fill(context)
            if self._states.n_tokens:
                self._step(context)
        except NativeError as failure:
            if isinstance(failure, NoKVSpace):
                self._clear()
            else:
                self.suspend()
            pass_on_lines()
            _log.warning("heads failed, requests go on without: %s", failure)

    def _fill(
        self, context: Context, slots: Collection[int] = (), depth: int = 0
    ) -> None:
        """Put all that was taken in into the batch; *slots* have *depth* cells more then."""
        batch, size = self._states, len(self._unknown)
        batch.clear()
        sizes = {slot: len(trail.tokens) for slot, trail in self._trails.items()}
        sizes |= {slot: sizes[slot] + depth for slot in slots}
        # A slot that loses cells goes on behind them: what was not read goes, too.
        for slot in self._make_room(slots, sizes, context):
            if slot in self._trails:
                trail = self._trails[slot]
                self._trails[slot] = Trail(trail.end, trail.last)
        for slot, trail in self._trails.items():
            tokens, hidden = trail.tokens, memoryview(trail.hidden)
            for start in range(0, len(tokens), batch.capacity):
                run = tokens[start : start + batch.capacity]
                if batch.n_tokens + len(run) > batch.capacity:
                    self._step(context)
                    batch.clear()
                states = hidden[start * size : (start + len(run)) * size]
                batch.add_hidden(run, trail.pos + start, slot, states, False)
            self._trails[slot] = Trail(trail.end, trail.last)

    def _step(self, context: Context) -> tuple[StepOutcome, float]:
        """Compute the batch; returns what came of it, and its seconds."""
        outcome = context.step(self._states, self._samplers)
        if outcome.code:
            raise decode_error(outcome.code, last_error(), "llama_decode")
        self.decode_ns += outcome.decode_ns
        self.cpu_ns += outcome.cpu_ns
        return outcome, (outcome.decode_ns + outcome.sample_ns) / 1e9

    def _run(self, works: list[Propose], context: Context) -> StepResult:
        batch, depth, trails = self._states, works[0].n_drafts, self._trails
        # Only the latest token of each is missing, so there is room for drafts in the same step.
        assert depth > 0
        # A slot that has not followed has no state to go on from.
        ready = [
            work
            for work in works
            if work.slot in trails and trails[work.slot].end == work.pos
        ]
        if not ready:
            return StepResult(outputs=(Lost(),) * len(works))
        drafts: dict[int, list[tuple[int, float]]] = {work.slot: [] for work in ready}
        states = [trails[work.slot].last for work in ready]
        tokens = [work.tokens[0] for work in ready]
        self._fill(context, drafts, depth)
        if batch.n_tokens + len(ready) > batch.capacity:
            self._step(context)
            batch.clear()
        rows = self._rows[: len(ready)]
        self._samplers.set_all([sampler for sampler, _ in rows])
        seconds = []
        for n_before in range(depth):
            for work, token, state in zip(ready, tokens, states, strict=True):
                pos = work.pos + n_before
                batch.add_hidden([token], pos, work.slot, state, True)
            outcome, step_s = self._step(context)
            seconds.append(step_s)
            # A row without numbers has no token, and so none after it.
            if outcome.codes:
                break
            tokens = outcome.tokens
            for work, token, (_, row) in zip(ready, tokens, rows, strict=True):
                drafts[work.slot].append((token, _chance(row.value)))
            states = [context.hidden(n, n + 1) for n in range(len(ready))]
            batch.clear()
        # Cells of drafts are of states that the heads made: those of the model come later.
        for work in ready:
            context.cut(work.slot, work.pos)
        outputs = [
            _output(drafts[work.slot], depth) if work.slot in drafts else Lost()
            for work in works
        ]
        return StepResult(
            outputs=tuple(outputs), draft_s=tuple(seconds), decode_s=sum(seconds)
        )

    def _clear(self) -> None:
        self._trails.clear()
        super()._clear()

    def suspend(self) -> None:
        self._trails.clear()
        super().suspend()


def _n_held(work: Work, output: Output) -> int:
    """First tokens of *work* that its slot holds after a step; 0: it holds none, or others."""
    if type(output) is Lost or type(work) is PrefillSpan or type(work) is ReadSource:
        return 0
    if type(work) is Verify:
        return len(output.tokens) if type(output) is Sampled else 1
    return len(work.tokens)


def _chance(logprob: float) -> float:
    """The probability of a draft; 0 where an infinite logit leaves it without a number."""
    return 0.0 if isnan(logprob) else exp(logprob)


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


def head_fields(config: EngineConfig, n_ctx: int, n_seq_max: int) -> dict[str, Any]:
    """Arguments of the context of heads, beside one of their model with *n_ctx* cells."""
    fields = context_fields(config.resolved_context, n_seq_max, n_ctx)
    of_model = {name: fields[name] for name in fields if name.startswith(OF_MODEL)}
    return draft_fields(config, n_ctx, n_seq_max) | of_model | {"ctx_type": "mtp"}


def open_heads(
    config: EngineConfig, use: ModelUse, n_ctx: int, n_seq_max: int
) -> HeadExecutor:
    """
    Make the context of the heads of a model, beside one with *n_ctx* cells.

    Raises:
        ConfigError: its file has none.
        Unsupported: this llama.cpp has no graph of them.
        ContextFailed, ModelLoadFailed: it cannot be had, or libllama cannot compute it.
    """
    model = use.model
    # The graph of these is newer than those of the others.
    if model.header.values.get("general.architecture") == "glm4moe":
        need("heads of 'glm4moe'", "llama_get_causal_attn")
    name = f"blk.{model.n_layer}.nextn.eh_proj.weight"
    if not any(tensor.name == name for tensor in model.header.tensors):
        raise ConfigError(
            f"speculation.mode='mtp': {model.path} states {model.n_layer_nextn} heads and "
            f"has no tensor {name!r}: give a file that was converted with its heads"
        )
    shared = use.share()
    try:
        return HeadExecutor(shared, n_seq_max, **head_fields(config, n_ctx, n_seq_max))
    except BaseException:
        shared.close()
        raise


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
