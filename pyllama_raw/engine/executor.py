"""
Does what a plan says, on a context.

Rules:
1. Failures of libllama come back as a status; only a context that cannot be built again
   is an exception, and ends the engine.
2. After an abort the memory tells how far it got. A token whose output row is lost is
   dropped again; memory that cannot drop one is cleared, and the result says so.
3. One C call a step; the batch is filled by slices.
4. After a steady plan the next step is begun ahead. If another plan comes, that step is
   dropped and its tokens are cut off again, so no plan can tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.request import Request, SamplerUse
from pyllama_raw.core.step import Chunk, DecodeStatus, StepPlan, StepResult
from pyllama_raw.engine.constraint import OutputRules
from pyllama_raw.engine.disk_writer import DiskWriter
from pyllama_raw.engine.guidance import MaskState
from pyllama_raw.engine.lanes import Lanes
from pyllama_raw.engine.open_requests import OpenRequest, OpenRequests
from pyllama_raw.engine.operations import CopyTimes, SlotOperations
from pyllama_raw.engine.parts import StepTimes
from pyllama_raw.engine.sampling import open_sampler
from pyllama_raw.engine.scores import watch, with_logprobs
from pyllama_raw.errors import (
    InvalidBatch,
    NativeError,
    PyllamaError,
    SamplingFailed,
)
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.check import decode_error
from pyllama_raw.native.context import Context, StepOutcome
from pyllama_raw.native.libllama import last_error
from pyllama_raw.native.sampler import RowSamplers, SamplerChain
from pyllama_raw.sampling.params import SamplingParams

log = logging.getLogger("pyllama_raw")


class NativeExecutor:
    """
    One context, and a sampler for each open request.

    Args:
        make_context: makes an empty context with the given lanes; called again when one
            has failed.
        lanes: of all its contexts.
        eog_tokens: what ignore_eos forbids.
        kind: whether the memory can forget the last tokens of a slot, and how it is
            captured.
        scratch: a slot no sequence uses.
        disk: None: nothing is kept in files.
    """

    def __init__(
        self,
        make_context: Callable[[Sequence[SamplerChain]], Context],
        eog_tokens: Iterable[int],
        *,
        lanes: Lanes,
        kind: SnapshotKind,
        scratch: int,
        disk: DiskWriter | None = None,
    ) -> None:
        self._make_context = make_context
        self._eog_tokens = frozenset(eog_tokens)
        self._kind = kind
        self._scratch = scratch
        self._disk = disk
        self._copied = CopyTimes()
        self.lanes = lanes
        self._use(make_context(lanes.fresh()))
        self._batch = Batch(self.context.max_tokens)
        self._row_samplers = RowSamplers(self.context.n_seq_max)
        self._advanced: tuple[Chunk, ...] = ()  # whose next tokens are in the batch
        self._refuses_cuts = False  # learned from the memory, or known by its kind:
        self._can_drop = kind is not SnapshotKind.EXACT
        self._n_failed = self._n_rebuilt = 0  # steps, contexts
        self._open = OpenRequests()
        self._n_steps = self._n_dropped = self._decode_ns = self._sample_ns = 0

    @property
    def times(self) -> StepTimes:
        copied = self._copied
        return StepTimes(
            self._n_steps,
            self._n_dropped,
            self._decode_ns / 1e9,
            self._sample_ns / 1e9,
            copied.capture_ns / 1e9,
            copied.restore_ns / 1e9,
            self.lanes.n_fallbacks,
        )

    def open(self, request: Request) -> None:
        """Build the sampler of *request*; `sampling` has its seed resolved."""
        params = request.sampling
        assert isinstance(params, SamplingParams)
        rules = request.rules
        started = named = None
        if isinstance(rules, OutputRules):
            named = rules.named
            started = rules.constraint.start() if rules.constraint else None
        sampler = open_sampler(
            params,
            self.context.model.vocab,
            request.tokens,
            request.stop_token_ids | self._eog_tokens,
            started,
            named=named,
        )
        opened = OpenRequest(
            params,
            sampler,
            started if isinstance(started, MaskState) else None,
            watch(params, sampler),
            self.lanes.missing(params, sampler),
        )
        self._open.add(request.request_id, opened)

    def close(self, request_id: int) -> SamplerUse | None:
        """Free the sampler; tells where it chose its tokens."""
        opened = self._open.pop(request_id)
        if opened is None:
            return None
        opened.sampler.close()
        return self.lanes.use(opened.sampler, opened.needs_all)

    def shutdown(self) -> None:
        """Free the context and all samplers; no call may follow."""
        self.context.drop()
        self.context.close()
        for request_id in self._open.request_ids:
            self.close(request_id)

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the memory operations, decode and sample."""
        if not plan.operations and self._continues(plan.chunks):
            return self._decode(plan.chunks, steady=plan.steady)
        lost = self._drop()
        if not (plan.operations or lost):
            return self._decode(plan.chunks, steady=plan.steady)
        captured, lost, restore_s = self._operations.run(plan.operations, lost)
        if not lost:
            result = self._decode(plan.chunks, steady=plan.steady)
            return result._replace(captured=captured, restore_s=restore_s)
        if self._operations.refuses_cuts:
            self._note_refusal()
        chunks = tuple(chunk for chunk in plan.chunks if chunk.slot not in lost)
        result = self._decode(chunks)
        tokens = _with_gaps(result.tokens, plan.chunks, lost)
        return result._replace(
            tokens=tokens,
            captured=captured,
            restore_s=restore_s,
            not_restored=lost,
            refuses_cuts=self._refuses_cuts,
        )

    def _continues(self, chunks: tuple[Chunk, ...]) -> bool:
        """Whether the batch holds just the tokens of *chunks*, perhaps computed already."""
        request_ids = [chunk.request_id for chunk in chunks]
        return request_ids == [chunk.request_id for chunk in self._advanced]

    def _decode(self, chunks: tuple[Chunk, ...], *, steady: bool = False) -> StepResult:
        if not chunks:
            return StepResult()
        try:
            outcome = self._compute(chunks, ahead=steady and self._can_drop)
        except InvalidBatch as error:
            return self._refused(error)
        except NativeError as error:  # lanes could not be switched
            return self._rebuilt(error)
        self._n_steps += 1
        self._decode_ns += outcome.decode_ns
        self._sample_ns += outcome.sample_ns
        if outcome.code == 0:
            result = self._sampled(chunks, outcome)
            if self._open.n_scored:
                return with_logprobs(result, chunks, self._open, self.context)
            return result
        return self._failed(chunks, outcome.code)

    def _compute(self, chunks: tuple[Chunk, ...], *, ahead: bool) -> StepOutcome:
        if self._open.n_masked:
            self._prepare_masks(chunks)
        if not self._advanced:
            if self._open.need_all(chunks):
                self.lanes.take_away(self.context)
            self._fill(chunks)
        self._advanced = ()
        outcome = self.context.step(self._batch, self._row_samplers, ahead=ahead)
        if outcome.code == 0 and self._batch.is_rows_only:
            self._advanced = chunks
        return outcome

    def _drop(self) -> frozenset[int]:
        """
        What was begun ahead is not wanted: as if it had not been.

        Returns slots that could not be cut for that, and are empty.
        """
        advanced, self._advanced = self._advanced, ()
        if not self.context.drop():
            return frozenset()
        self._n_dropped += 1
        lost = set()
        for chunk in advanced:
            n_known = chunk.pos + len(chunk.tokens)
            if not self.context.cut(chunk.slot, n_known):
                lost.add(chunk.slot)
        if lost:
            self._note_refusal()
        return frozenset(lost)

    def _note_refusal(self) -> None:
        """The memory has refused a cut: from now on it is asked for none."""
        self._refuses_cuts, self._can_drop = True, False

    def _fill(self, chunks: tuple[Chunk, ...]) -> None:
        batch = self._batch
        batch.clear()
        n_rows = _count_rows(chunks)
        decodes = chunks[:n_rows]
        batch.add_rows(
            [chunk.tokens[0] for chunk in decodes],
            [chunk.pos for chunk in decodes],
            [chunk.slot for chunk in decodes],
        )
        samplers = [self._open[chunk.request_id].sampler for chunk in decodes]
        for request_id, slot, pos, tokens, wants_output, targets in chunks[n_rows:]:
            add = batch.add if targets is None else batch.add_scored
            add(tokens, pos, slot, wants_output)
            if wants_output:
                samplers.append(self._open[request_id].sampler)
        self._row_samplers.set_all(samplers)

    def _prepare_masks(self, chunks: tuple[Chunk, ...]) -> None:
        for chunk in chunks:
            mask = self._open[chunk.request_id].mask
            if mask is not None and chunk.wants_output:
                mask.prepare()

    def _sampled(self, chunks: tuple[Chunk, ...], outcome: StepOutcome) -> StepResult:
        if not (self._open.n_masked or outcome.codes):
            return StepResult(tokens=tuple(outcome.tokens))
        tokens: list[int | None] = [*outcome.tokens]
        errors: dict[int, PyllamaError] = {}
        outputs = [chunk for chunk in chunks if chunk.wants_output]
        codes = outcome.codes or [0] * len(outputs)
        for row, (chunk, code) in enumerate(zip(outputs, codes, strict=True)):
            mask = self._open[chunk.request_id].mask
            token = tokens[row]
            if code:
                said = (mask.error if mask is not None else "") or last_error()
                message = said or "the sampler failed"
                errors[chunk.request_id] = SamplingFailed(
                    "llama_sampler_sample", code, message
                )
                tokens[row] = None
            elif mask is not None and token is not None:
                mask.accept(token)
        return StepResult(tokens=tuple(tokens), row_errors=errors)

    def _failed(self, chunks: tuple[Chunk, ...], code: int) -> StepResult:
        match code:
            case 1:
                return StepResult(DecodeStatus.NO_SPACE)
            case 2:
                known = {chunk.slot: self._n_kept(chunk) for chunk in chunks}
                return StepResult(
                    DecodeStatus.ABORTED,
                    n_computed=known,
                    refuses_cuts=self._refuses_cuts,
                )
            case -1:
                return self._refused(decode_error(code, last_error()))
            case _:
                return self._rebuilt(decode_error(code, last_error()))

    def _refused(self, error: NativeError) -> StepResult:
        self._n_failed += 1
        log.warning("a batch was refused (failed step %d): %s", self._n_failed, error)
        return StepResult(DecodeStatus.INVALID, error=error)

    def _rebuilt(self, error: NativeError) -> StepResult:
        """The context cannot be used any more."""
        self._n_failed += 1
        self._n_rebuilt += 1
        log.warning(
            "a decode failed (failed step %d); the context is made anew (rebuild %d) and "
            "what ran is computed again: %s",
            self._n_failed,
            self._n_rebuilt,
            error,
        )
        self._rebuild()
        return StepResult(DecodeStatus.FAILED, error=error)

    def _n_kept(self, chunk: Chunk) -> int:
        """How many positions of its slot an aborted decode left usable."""
        slot = chunk.slot
        if self._kind is SnapshotKind.EXACT or self._refuses_cuts:
            self.context.seq_rm(slot)
            return 0
        highest = self.context.seq_pos_max(slot)
        n_known = 0 if highest is None else highest + 1
        if chunk.wants_output and n_known == chunk.pos + len(chunk.tokens):
            n_known -= 1
            if not self.context.cut(slot, n_known):
                self._note_refusal()
                return 0
        return n_known

    def _rebuild(self) -> None:
        self.context.close()  # first, so that there is memory for the new one
        self.lanes.give_up()
        self._use(self._make_context(self.lanes.fresh()))

    def _use(self, context: Context) -> None:
        self.context = context
        self._operations = SlotOperations(
            context, self._kind, self._scratch, self._copied, self._disk
        )


def _count_rows(chunks: tuple[Chunk, ...]) -> int:
    """How many chunks at the front are one token with an output row."""
    for index, chunk in enumerate(chunks):
        if len(chunk.tokens) != 1 or not chunk.wants_output:
            return index
    return len(chunks)


def _with_gaps(
    tokens: tuple[int | None, ...], chunks: tuple[Chunk, ...], lost: frozenset[int]
) -> tuple[int | None, ...]:
    """One place for each output row of *chunks*, None for slots that were lost."""
    computed = iter(tokens)
    return tuple(
        None if chunk.slot in lost else next(computed, None)
        for chunk in chunks
        if chunk.wants_output
    )
