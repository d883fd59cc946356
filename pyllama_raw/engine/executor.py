"""
Does what a plan says, on a context.

Rules:
1. Failures of libllama come back as a status. A context that cannot be built again, because
   memory is short, is tried again by the next step.
2. After an abort the memory tells how far it got. A token whose output row is lost is
   dropped again; memory that cannot drop one is cleared, and the result says so.
3. One C call a step.
4. After a steady plan the next step is begun ahead. If another plan comes, that step is
   dropped and its tokens are cut off again, so no plan can tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import DRAFTS, Request, SamplerUse, text_of
from pyllama_raw.core.scheduling.speculation import MAX_DEPTH
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.core.step import (
    DecodeStatus,
    Delete,
    Fetch,
    Load,
    Lost,
    Move,
    Output,
    PartlyComputed,
    PrefillSpan,
    ReadSource,
    Sampled,
    StepPlan,
    StepResult,
    Verify,
    Work,
)
from pyllama_raw.engine.adapters import AdapterSets
from pyllama_raw.engine.draft_executor import DraftExecutor
from pyllama_raw.engine.embed_executor import EmbedExecutor
from pyllama_raw.engine.guidance import MaskState
from pyllama_raw.engine.mailbox import AbortGate
from pyllama_raw.engine.operations import SlotOperations, captured, restored, warm_up
from pyllama_raw.engine.rows import Rows
from pyllama_raw.engine.sampling import (
    BuiltSampler,
    BuiltSamplers,
    Lanes,
    OutputRules,
    open_sampler,
    watch,
)
from pyllama_raw.engine.state_files import DiskWriter
from pyllama_raw.errors import ContextFailed, InvalidBatch, NativeError, SnapshotFailed
from pyllama_raw.native.context import Context, StepOutcome
from pyllama_raw.native.libllama import decode_error, last_error, pass_on_lines
from pyllama_raw.native.model import Adapter, load_adapter
from pyllama_raw.native.sampler import SamplerChain
from pyllama_raw.options.sampling import SamplingParams

if TYPE_CHECKING:
    from pyllama_raw.engine.media_desk import MediaRows

log = logging.getLogger("pyllama_raw")


class NativeExecutor:
    """
    One context, and a sampler for each open request.

    Args:
        make_context: makes an empty context with the given lanes and one flag for all, that
            aborts a decode; called again when one has failed.
        lanes: of all its contexts.
        kind: whether the memory can forget the last tokens of a slot, and how it is
            captured.
        scratch: a slot no sequence uses.
        disk: None: nothing is kept in files.
        texts: does the steps of texts, on contexts of its own.
    """

    def __init__(
        self,
        make_context: Callable[[Sequence[SamplerChain]], Context],
        *,
        lanes: Lanes,
        kind: SnapshotKind,
        scratch: int,
        disk: DiskWriter | None = None,
        texts: EmbedExecutor | None = None,
    ) -> None:
        # One gate for both: a step is of texts or of sequences, and either can be aborted.
        self._texts = texts
        self._gate = AbortGate() if texts is None else texts.gate
        self._make_context = make_context
        self._disk = disk
        self.lanes = lanes
        self.adapters = AdapterSets()
        # Without lanes, because probes look at whole rows; see attach_lanes().
        self.context = make_context(())
        self._operations = SlotOperations(self.context, kind, scratch, disk)
        self._advanced: tuple[Work, ...] = ()  # whose next tokens are in the batch
        self._lost = frozenset[int]()  # slots that were emptied between two steps
        self._n_failed = self._n_rebuilt = 0  # steps, contexts
        self._open = BuiltSamplers()
        max_rows = max(self.context.n_seq_max, self.context.n_outputs_max)
        self._rows = Rows(self._open, self.context.max_tokens, max_rows)
        self.speculates = False  # whether plans may have drafts: see build.py
        self.drafts: DraftExecutor | None = None  # the draft model or heads, if any
        self._n_dropped = self._decode_ns = self._sample_ns = self._cpu_ns = 0

    def attach_lanes(self) -> None:
        """
        Give the slots their lanes, once the context has been probed.

        A probe compares whole rows. Of the rows of slots with a lane libllama copies candidates
        only, and of those without one, as the scratch slot, all logits: these are not the same
        numbers, and look like mixed sequences.

        Raises:
            NativeError: libllama threw, and the context cannot be used.
        """
        if lanes := self.lanes.fresh():
            self.context.set_lanes(lanes)

    @property
    def times(self) -> StepTimes:
        # Other contexts have times of their own.
        decode_ns = self._decode_ns + sum(part.decode_ns for part in self._others)
        cpu_ns = self._cpu_ns + sum(part.cpu_ns for part in self._others)
        return StepTimes(
            decode_ns / 1e9,
            self._sample_ns / 1e9,
            self._operations.capture_s,
            self._operations.restore_s,
            self._n_dropped,
            self.lanes.n_fallbacks,
            self.adapters.n_switches,
            self.adapters.spent_s,
            cpu_ns / 1e9,
        )

    @property
    def _others(self) -> list[EmbedExecutor | DraftExecutor]:
        """The executors of texts and of the draft model, if they are there."""
        return [part for part in (self._texts, self.drafts) if part is not None]

    def load_adapter(self, path: str) -> Adapter:
        """Load an adapter of the model. Thread: any."""
        return load_adapter(self.context.model, path)

    def add_adapter(self, number: int, adapter: Adapter) -> None:
        """Take over *adapter*, which plans name by *number*."""
        self.adapters.add(number, adapter)

    def remove_adapter(self, number: int) -> None:
        """Free an adapter of `adapters`, which nobody uses any more."""
        # What was begun ahead computes with the adapter that goes.
        if self.adapters.is_on(number):
            self._lost |= self._drop()
        self.adapters.remove(number, self.context)

    def open(self, request: Request) -> None:
        """Build the sampler of *request*, if it has one; its payloads are MediaRows."""
        # Nothing is sampled of a text that becomes a vector.
        if request.lot.makes_vectors:
            return
        assert len(request.payloads) == len(request.spans)
        params, rules = request.sampling, request.rules
        assert isinstance(params, SamplingParams)
        vocab = self.context.model.vocab
        spans = request.spans
        text = text_of(request.tokens, spans) if spans else request.tokens
        # Rules of an output are a constraint, names of tokens, or both.
        constraint = token_names = None
        if isinstance(rules, OutputRules):
            token_names = rules.token_names
            constraint = rules.start() if rules.start else None
        sampler = open_sampler(
            params,
            vocab,
            text,
            request.stop_token_ids | vocab.eog_tokens,
            constraint,
            token_names=token_names,
        )
        needs_all = self.lanes.missing(params, sampler)
        is_drafted = self.speculates and request.speculates
        mask = constraint if isinstance(constraint, MaskState) else None
        if is_drafted and mask is not None:
            mask.expect_drafts()
        built = BuiltSampler(
            params,
            sampler,
            mask,
            watch(params, sampler, 1 + MAX_DEPTH if is_drafted else 1),
            needs_all,
            cast("tuple[MediaRows, ...]", request.payloads),
            is_drafted,
        )
        self._open.add(request.request_id, built)

    def close(self, request_id: int) -> SamplerUse | None:
        """Free the sampler; tells where it chose its tokens."""
        built = self._open.pop(request_id)
        if built is None:
            return None
        # The sampler has counted its tokens on either side.
        use = self.lanes.use(built.sampler, built.needs_all)
        built.sampler.close()
        return use

    def shutdown(self) -> None:
        """Free the context and all samplers; no call may follow."""
        with ExitStack() as stack:  # all is freed, whatever fails
            for request_id in list(self._open.by_id):
                stack.callback(self.close, request_id)
            for part in self._others:
                stack.callback(part.shutdown)
            stack.callback(self.adapters.close)
            if not self.context.closed:  # it is, while the engine sleeps
                stack.callback(self.context.close)
                stack.callback(self.context.drop)

    # As EngineExecutor says, of this context and those of texts.

    def suspend(self) -> object:
        self._lost |= self._drop()
        # A copy that fails raises here, before anything is freed.
        copies = captured(self.context)
        self.context.close()
        self.adapters.renew()
        for part in self._others:
            part.suspend()
        return copies

    def resume(self, state: object) -> bool:
        # A new session that slept has its context already.
        if self.context.closed:  # else it was made for a scheduler that slept
            self._use(self._make_context(self.lanes.fresh()))
        if self._texts is not None:
            self._texts.resume(None)
        # Whether slots hold what they held; if not, the scheduler is told that they are empty.
        return restored(self.context, state)

    def rebuild(self) -> None:
        if not self.context.closed:
            self.context.drop()
        self._advanced, self._lost = (), frozenset()
        self._n_rebuilt += 1
        self._rebuild()
        for part in self._others:
            part.rebuild()

    def warm_up(self) -> bool:
        self._lost |= self._drop()
        if self._texts is not None:
            self._texts.warm_up()
        return warm_up(self.context)

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the moves, decode and sample."""
        if self._disk is not None:
            # Threads of files rest while others compute.
            self._disk.others_compute = bool(plan.works)
        if plan.lot.makes_vectors:
            assert self._texts is not None
            return self._texts.execute(plan)
        if plan.lot == DRAFTS:
            assert self.drafts is not None
            return self.drafts.execute(plan, self._execute, self._gate)
        flag = self.context.abort
        assert flag is not None
        self._gate.enter(plan.works, flag)
        try:
            return self._execute(plan)
        finally:
            self._gate.leave()

    def stop(self, request_id: int | None = None) -> None:
        """Abort a step that nobody wants. Thread: any."""
        self._gate.stop(request_id)

    def _execute(self, plan: StepPlan) -> StepResult:
        # The last failure left no context, because memory was short: this step tries again.
        if self.context.closed and (error := self._rebuild()) is not None:
            return StepResult(DecodeStatus.FAILED, error=error)
        moves, works, lot, steady = plan
        if self.drafts is not None and moves:
            self.drafts.move(moves)
        # A forged file has left what no slot can forget, and what slots would compute with.
        if self.context.is_spoilt:
            return self._unspoilt(moves)
        # The step that was begun ahead is the one that is wanted, and moves concern none of its
        # slots: its result is waited for, then the moves are done. Drafts are never begun ahead.
        is_wanted = (
            lot.adapters == self.adapters.on
            and not (works and type(works[-1]) is Verify)
            and [w.request_id for w in works] == [w.request_id for w in self._advanced]
        )
        if is_wanted and (not moves or _are_beside(moves, works)):
            result = self._decode(works, plan._replace(steady=steady and not moves))
            return self._filled(moves, result) if moves else result
        # Another step: the one begun ahead is undone. Slots that cannot forget its tokens are
        # lost.
        lost, self._lost = self._drop() | self._lost, frozenset()
        # Nothing moves.
        if not (moves or lost):
            return self._decode(works, plan)
        # Moves come before works, because works may stand on what they bring.
        saved, lost, restore_s, moves_s = self._operations.run(moves, lost)
        if not lost:
            result = self._decode(works, plan)
            return result._replace(saved=saved, restore_s=restore_s, moves_s=moves_s)
        # Works of slots that could not be filled are left out. The others are computed; the
        # scheduler learns from Lost() which to begin anew.
        works_left = tuple(work for work in works if work.slot not in lost)
        result = self._decode(works_left, plan._replace(steady=False))
        outputs = result.outputs
        if result.status in (DecodeStatus.OK, DecodeStatus.ABORTED):
            computed = iter(outputs)
            outputs = tuple(Lost() if w.slot in lost else next(computed) for w in works)
        return result._replace(
            outputs=outputs,
            saved=saved,
            restore_s=restore_s,
            moves_s=moves_s,
            not_restored=lost | result.not_restored,
            refuses_cuts=self._operations.refuses_cuts,
        )

    def _unspoilt(self, moves: tuple[Move, ...]) -> StepResult:
        """Do *moves*, because somebody waits for their files, then make the context anew."""
        lost, self._lost = self._drop() | self._lost, frozenset()
        saved, lost, restore_s, moves_s = self._operations.run(moves, lost)
        reason = "a state had positions that no slot has"
        error = SnapshotFailed("llama_state_seq_set_data_ext", 0, reason)
        return self._rebuilt(error)._replace(
            saved=saved, not_restored=lost, restore_s=restore_s, moves_s=moves_s
        )

    def _filled(self, moves: tuple[Move, ...], result: StepResult) -> StepResult:
        """Do *moves* after a decode that they do not concern."""
        if result.status is DecodeStatus.FAILED:
            # There is another context, which the scheduler fills anew: a load is of no use to
            # it.
            moves = tuple(move for move in moves if not isinstance(move, Load))
        _, lost, restore_s, moves_s = self._operations.run(moves)
        return result._replace(
            not_restored=lost,
            refuses_cuts=self._operations.refuses_cuts,
            restore_s=restore_s,
            moves_s=moves_s,
        )

    def _decode(self, works: tuple[Work, ...], plan: StepPlan) -> StepResult:
        """Compute *works* as *plan* says."""
        if not works:
            return StepResult()
        adapters, adapter_set = self.adapters, plan.lot.adapters
        try:
            # To switch has all graphs prepared anew, so only a change does.
            if adapter_set != adapters.on:
                adapters.switch(self.context, adapter_set)
            outcome = self._outcome(works, plan)
        except InvalidBatch as error:
            return self._refused(error)
        except NativeError as error:  # lanes or adapters could not be switched
            return self._rebuilt(error)
        self._decode_ns += outcome.decode_ns
        self._sample_ns += outcome.sample_ns
        self._cpu_ns += outcome.cpu_ns
        decode_s, sample_s = outcome.decode_ns / 1e9, outcome.sample_ns / 1e9
        if outcome.code:
            failed = self._failed(works, outcome.code)
            return failed._replace(decode_s=decode_s, sample_s=sample_s)
        result = StepResult(outputs=self._rows.outputs(works, outcome, self.context))
        if self._rows.batch.has_drafts:
            result = self._without_drafts(works, result.outputs)
        # The first two decodes after a switch tell what it has cost.
        elif adapters.is_learning:
            switch_s = adapters.learned(plan.n_tokens, outcome.decode_ns)
            result = result._replace(switch_s=switch_s)
        if self.drafts is not None:
            self.drafts.follow(works, result.outputs, self._rows, self.context)
        return result._replace(decode_s=decode_s, sample_s=sample_s)

    def _without_drafts(
        self, works: tuple[Work, ...], outputs: tuple[Output, ...]
    ) -> StepResult:
        """The result of a step, once the slots have lost the drafts that were wrong."""
        lost = set()
        for work, output in zip(works, outputs, strict=True):
            # It holds what was sampled but for the last token, and the token before that.
            n_held = len(output.tokens) if type(output) is Sampled else 1
            is_held = len(work.tokens) <= n_held
            if not (is_held or self.context.cut(work.slot, work.pos + n_held)):
                lost.add(work.slot)
        if lost:
            self._operations.note_refusal()
        return StepResult(
            outputs=tuple(
                Lost() if work.slot in lost else output
                for work, output in zip(works, outputs, strict=True)
            ),
            not_restored=frozenset(lost),
            refuses_cuts=self._operations.refuses_cuts,
        )

    def _outcome(self, works: tuple[Work, ...], plan: StepPlan) -> StepOutcome:
        # Rows of embeddings have a batch of their own.
        if type(works[0]) is PrefillSpan:
            return self._rows.compute_spans(works, self.context)
        if type(works[0]) is ReadSource:
            return self._rows.read_sources(works, self.context)
        # Masks are made while the decode runs.
        if self._open.n_masked:
            self._rows.prepare_masks(works)
        # Else the batch holds these tokens already, because the shim has put them there.
        if not self._advanced:
            if self._open.n_needing_all and self._open.need_all(works):
                self.lanes.take_away(self.context)
            self._rows.fill(works)
        self._advanced = ()
        batch, samplers = self._rows.batch, self._rows.samplers
        # Memory that cannot be cut could not take back a step begun ahead.
        ahead = plan.steady and self._operations.can_cut
        # One C call: decode, sample, and perhaps begin the next decode.
        outcome = self.context.step(batch, samplers, ahead=ahead)
        # A batch of one token a slot was filled with the next tokens by the shim.
        if outcome.code == 0 and batch.is_rows_only:
            self._advanced = works
        return outcome

    def _drop(self) -> frozenset[int]:
        """
        Undo what was begun ahead, because it is not wanted.

        Returns slots that could not be cut for that, and are empty.
        """
        advanced, self._advanced = self._advanced, ()
        if self.context.closed or not self.context.drop():
            return frozenset()
        self._n_dropped += 1
        lost = set()
        # Its tokens are behind what each slot is to hold.
        for work in advanced:
            if not self.context.cut(work.slot, work.pos + len(work.tokens)):
                lost.add(work.slot)
        if lost:
            self._operations.note_refusal()
        return frozenset(lost)

    def _failed(self, works: tuple[Work, ...], code: int) -> StepResult:
        reads = type(works[0]) is ReadSource
        function = "llama_encode" if reads else "llama_decode"
        match code:
            # No cells are left. The memory is as before.
            case 1:
                return StepResult(DecodeStatus.NO_SPACE)
            # Somebody aborted it. Each slot tells how far it got.
            case 2:
                return StepResult(
                    DecodeStatus.ABORTED,
                    outputs=tuple(map(self._left, works)),
                    refuses_cuts=self._operations.refuses_cuts,
                )
            # The batch is wrong, and the memory as before.
            case -1:
                return self._refused(decode_error(code, last_error(), function))
            # Anything else leaves a context that nobody can use.
            case _:
                return self._rebuilt(decode_error(code, last_error(), function))

    def _refused(self, error: NativeError) -> StepResult:
        self._n_failed += 1
        pass_on_lines()
        log.warning("a batch was refused (failed step %d): %s", self._n_failed, error)
        return StepResult(DecodeStatus.INVALID, error=error)

    def _rebuilt(self, error: NativeError) -> StepResult:
        """The context cannot be used any more."""
        self._n_failed += 1
        self._n_rebuilt += 1
        pass_on_lines()
        log.warning(
            "a decode failed (failed step %d); the context is made anew (rebuild %d) and "
            "what ran is computed again: %s",
            self._n_failed,
            self._n_rebuilt,
            error,
        )
        self._rebuild()
        return StepResult(DecodeStatus.FAILED, error=error)

    def _left(self, work: Work) -> PartlyComputed | Lost:
        """Part of *work* that an aborted decode left, without a token to be sampled from."""
        slot, n_tokens = work.slot, len(work.tokens)
        if not self._operations.can_cut:
            # Nothing can be cut off, so what is there cannot be trusted.
            self.context.seq_rm(slot)
            return Lost()
        if type(work) is PrefillSpan:
            return PartlyComputed(0)  # positions do not tell how many rows there are
        highest = self.context.seq_pos_max(slot)
        # The abort came before anything of it was there.
        if highest is None:
            return Lost()
        n_held = max(highest + 1 - work.pos, 0)  # a span may have ended further back
        # The last token is there, but its row of logits is not: it is computed once more. Nor is
        # that of the first one, if the others are drafts.
        n_most = 0 if type(work) is Verify else n_tokens - 1
        if work.samples and n_held > n_most:
            n_held = n_most
            if not self.context.cut(slot, work.pos + n_held):
                self._operations.note_refusal()
                return Lost()
        return PartlyComputed(n_held)

    def _rebuild(self) -> NativeError | None:
        """Make the context anew; the error if that cannot be done now."""
        self.context.close()  # first, so that there is memory for the new one
        self._advanced = ()
        self.lanes.give_up()
        try:
            self._use(self._make_context(self.lanes.fresh()))
        except NativeError as error:
            log.warning("the context cannot be made anew now: %s", error)
            return error
        except MemoryError:
            return ContextFailed("llama_init_from_model", None, "no memory is left")
        return None

    def _use(self, context: Context) -> None:
        self.context = self._operations.context = context
        self.adapters.renew()


def _are_beside(moves: tuple[Move, ...], works: tuple[Work, ...]) -> bool:
    """
    Whether *moves* concern files and slots of no work only.

    They may then come after the works: what was begun ahead of them is still wanted.
    """
    slots = {work.slot for work in works}
    return all(
        isinstance(move, Fetch | Delete)
        or (isinstance(move, Load) and move.slot not in slots)
        for move in moves
    )
