"""
Makes vectors of texts, on a context of its own for each way of pooling.

Rules:
1. As of the executor that generates, failures of libllama come back as a status.
2. After a step no slot holds anything but a text that is computed in part; after a step that
   failed none does.
3. What is not finite is never given out. It may have come from a neighbour, with whom it
   shared cells, so a step with several texts then counts as failed.
4. A context is made when its pooling is first wanted, by the thread that wants it. At most
   MAX_CONTEXTS are kept, those that were used last.
5. libllama pools the tokens of one decode. A text of a causal model may take several, so of these
   models we pool ourselves what needs more than the last token: the context gives the vector of
   each token, and what the pooling needs of them is collected from step to step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any

from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.request import Request, SamplerUse
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.core.step import (
    Computed,
    DecodeStatus,
    Encode,
    Output,
    RowFailed,
    StepPlan,
    StepResult,
    Vector,
)
from pyllama_raw.engine.info import Pooling
from pyllama_raw.engine.mailbox import AbortGate
from pyllama_raw.errors import (
    ClosedError,
    DecodeAborted,
    EmbeddingFailed,
    InvalidRequest,
    NativeError,
)
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import check_decode, last_error
from pyllama_raw.native.sampler import RowSamplers

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_CONTEXTS = 2  # an application may have vectors of texts and of tokens, or ranks
COLLECTED = (Pooling.NONE, Pooling.MEAN, Pooling.CLS)  # need more than the last token


class EmbedExecutor:
    """
    An executor of texts only; one that generates may have it do the steps of texts.

    Args:
        limits: of each context.
        make_context: makes an empty context that pools like this.
            Each has a flag of its own, so an abort of one concerns no other.
        may_cut: a step may have a part of a text, because tokens see none behind them.
    """

    def __init__(
        self,
        limits: ContextLimits,
        make_context: Callable[[Pooling], Context],
        *,
        may_cut: bool,
    ) -> None:
        self.limits = limits
        self.gate = AbortGate()
        self._make_context, self._may_cut = make_context, may_cut
        self._collected: list[NDArray[Any]] = []  # of a text that is computed in part
        self._contexts: dict[Pooling, Context] = {}  # in the order of their last use
        self._used: Pooling | None = None  # by the last step
        self._lock = Lock()  # held while a context is made or closed
        self._is_closed = self._is_suspended = False
        self._batch = Batch(limits.n_batch)
        self._no_samplers = RowSamplers(1)
        self.decode_ns = self.cpu_ns = 0  # since the start

    @property
    def times(self) -> StepTimes:
        return StepTimes(decode_s=self.decode_ns / 1e9, decode_cpu_s=self.cpu_ns / 1e9)

    def is_ready(self, pooling: Pooling) -> bool:
        """Whether nobody need make the context that pools like this. Thread: any."""
        return self._is_suspended or self._kind(pooling) in self._contexts

    def prepare(self, pooling: Pooling) -> Context | None:
        """
        Make the context for texts that pool like this, unless there is one. Thread: any.

        Returns:
            None while the engine sleeps: the first step after that makes it.

        Raises:
            ContextFailed, NativeError: it cannot be made.
            ClosedError: the engine is closed.
        """
        kind = self._kind(pooling)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the engine is closed")
            # Nobody makes a context while the engine sleeps.
            if self._is_suspended:
                return None
            if kind not in self._contexts:
                self._contexts[kind] = self._make_context(kind)
            return self._contexts[kind]

    def _kind(self, pooling: Pooling) -> Pooling:
        """How the context of texts that pool like this pools."""
        return Pooling.NONE if self._may_cut and pooling in COLLECTED else pooling

    def suspend(self) -> object:
        """Free the contexts, which hold nothing between two texts that anybody needs."""
        with self._lock:
            # A text that was computed in part begins anew afterwards.
            self._is_suspended, self._used = True, None
            while self._contexts:
                self._contexts.popitem()[1].close()
        return None

    def resume(self, state: object) -> bool:  # noqa: ARG002 - there is none
        """Have the next steps make the contexts again."""
        self._is_suspended = False
        return True

    def rebuild(self) -> None:
        """Have the next steps make other contexts."""
        self.suspend()
        self.resume(None)

    def warm_up(self) -> bool:
        """Compute a step of one text in each context, for nothing. Raises NativeError."""
        for context in self._contexts.values():
            compute(context, min(self._batch.capacity, context.max_tokens))
        return True

    def open(self, request: Request) -> None:
        """The name of the lot of *request* is how its texts are pooled."""
        assert request.lot.name in set(Pooling)

    def close(self, request_id: int) -> SamplerUse | None:  # noqa: ARG002
        """Nothing was sampled."""
        return None

    def stop(self, request_id: int | None = None) -> None:
        """Abort a step that nobody wants. Thread: any."""
        self.gate.stop(request_id)

    def shutdown(self) -> None:
        """Free the contexts; no call may follow."""
        with self._lock:
            self._is_closed = True
            while self._contexts:
                self._contexts.popitem()[1].close()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the texts of *plan*, which has no moves."""
        works = [work for work in plan.works if isinstance(work, Encode)]
        assert len(works) == len(plan.works)
        assert not plan.moves
        # A plan that only ends requests.
        if not works:
            return StepResult()
        pooling = Pooling(plan.lot.name)
        try:
            context = self._context_for(pooling)
            assert context.abort is not None
            self.gate.enter(works, context.abort)
            return self._run(works, context, pooling)
        # Nobody wants its texts any more. Half of a text is of no use.
        except DecodeAborted:
            self._clear(self._contexts[self._kind(pooling)])
            return StepResult(DecodeStatus.ABORTED)
        # The context of this pooling goes, others are as they were.
        except NativeError as error:
            self._drop(pooling)
            return StepResult(DecodeStatus.FAILED, error=error)
        finally:
            self.gate.leave()

    def _run(
        self, works: list[Encode], context: Context, pooling: Pooling
    ) -> StepResult:
        batch = self._batch
        batch.clear()
        for work in works:
            # A text begins: its place may have a part of one that was given up.
            if context.has_memory and not work.pos:
                context.seq_rm(work.slot)  # its text may have been given up
            batch.add_scored(work.tokens, work.pos, work.slot)
        outcome = context.step(batch, self._no_samplers)
        self.decode_ns += outcome.decode_ns
        self.cpu_ns += outcome.cpu_ns
        check_decode(outcome.code, last_error() if outcome.code else "")
        # The first row of each text.
        rows = accumulate((len(work.tokens) for work in works), initial=0)
        outputs = tuple(
            self._output(context, work, pooling, row)
            for work, row in zip(works, rows, strict=False)
        )
        failed = [output for output in outputs if isinstance(output, RowFailed)]
        if failed:
            self._clear(context)
        # One of them is at fault, and nobody knows which: the scheduler tries each alone.
        if failed and len(works) > 1:
            return StepResult(DecodeStatus.INVALID, error=failed[0].error)
        if context.has_memory:
            for work in works:
                if work.is_last:
                    context.seq_rm(work.slot)
        return StepResult(outputs=outputs, decode_s=outcome.decode_ns / 1e9)

    def _context_for(self, pooling: Pooling) -> Context:
        """The context that is used now; too many others are closed. Thread: the engine's."""
        contexts, kind = self._contexts, self._kind(pooling)
        # The context of the last step: nobody closes it meanwhile.
        if kind is self._used and len(contexts) <= MAX_CONTEXTS:
            return contexts[kind]
        context = self.prepare(pooling)
        assert context is not None
        with self._lock:
            # It is the latest now, and the oldest goes.
            contexts[kind] = contexts.pop(kind)
            while len(contexts) > MAX_CONTEXTS:
                contexts.pop(next(iter(contexts))).close()
        self._used = kind
        return context

    def _drop(self, pooling: Pooling) -> None:
        """Have the context made anew by the next step."""
        self._used, self._collected = None, []
        with self._lock:
            context = self._contexts.pop(self._kind(pooling), None)
            if context is not None:
                context.close()

    def _clear(self, context: Context) -> None:
        """Have no slot hold anything."""
        self._collected = []
        if context.has_memory:
            context.clear()

    def _output(
        self, context: Context, work: Encode, pooling: Pooling, row: int
    ) -> Output:
        """The vector of *work*, whose first token was in *row*; libllama may have none."""
        import numpy as np

        try:
            # The context gives a vector for each token, and this thread pools them.
            if self._kind(pooling) is Pooling.NONE:
                rows = context.token_vectors(row, row + len(work.tokens))
                values = self._pooled(work, pooling, rows)
            else:
                values = context.vector(work.slot) if work.is_last else b""
        except InvalidRequest as error:
            return RowFailed(NativeError("llama_get_embeddings", None, str(error)))
        if not work.is_last:
            return Computed()
        # A model may make numbers that are none of some text.
        if np.isfinite(np.frombuffer(values, np.float32)).all():
            return Vector(values)
        return RowFailed(EmbeddingFailed())

    def _pooled(self, work: Encode, pooling: Pooling, values: bytes) -> bytes:
        """The vector of a text, of which *work* was the last part; else nothing is said yet."""
        import numpy as np

        rows = np.frombuffer(values, np.float32).reshape(len(work.tokens), -1)
        before = self._collected if work.pos else []
        collected: list[NDArray[Any]]
        match pooling:
            # All of them, one after the other.
            case Pooling.NONE:
                collected = [*before, rows]
            # That of the first token, which came with the first part.
            case Pooling.CLS:
                collected = before or [rows[:1]]
            # The mean: a sum until the last part, in 64 bits.
            case _:
                total = rows.sum(axis=0, dtype=np.float64)
                collected = [total + before[0] if before else total]
        if not work.is_last:
            # A text that was cut is in slot 0, and no other one is (core/scheduling/texts.py).
            assert work.slot == 0
            self._collected = collected
            return b""
        if work.slot == 0:
            self._collected = []
        if pooling is Pooling.MEAN:
            n_tokens = work.pos + len(work.tokens)
            return (collected[0] / n_tokens).astype(np.float32).tobytes()
        return b"".join(part.tobytes() for part in collected)


def compute(context: Context, n_tokens: int) -> None:
    """Compute a text of so many tokens, for nothing. Raises NativeError: it cannot be done."""
    batch = Batch(n_tokens)
    token = context.model.vocab.bos or 0
    batch.add_scored(array("i", [token] * n_tokens), 0, 0)
    context.decode(batch)
    if context.has_memory:
        context.clear()
