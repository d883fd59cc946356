"""
Makes vectors of texts, on a context of its own for each way of pooling, one at a time.

Rules:
1. As of the executor that generates, failures of libllama come back as a status.
2. After a step no slot holds anything but a text that is computed in part; after a step that
   failed none does.
3. What is not finite is never given out. It may have come from a neighbour, with whom it
   shared cells, so a step with several texts then counts as failed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

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
from pyllama_raw.engine.abort import AbortGate, PolledFlag
from pyllama_raw.engine.model_info import Pooling
from pyllama_raw.errors import DecodeAborted, EmbeddingFailed, NativeError
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context


class EmbedExecutor:
    """
    Args:
        context: the first one.
        make_context: makes an empty context that pools like this.
        flag: aborts a decode of these contexts.
    """

    def __init__(
        self,
        pooling: Pooling,
        make_context: Callable[[Pooling], Context],
        *,
        flag: PolledFlag,
    ) -> None:
        self._gate = AbortGate(flag)
        self._make_context = make_context
        self._pooling = pooling  # of the context
        self._context: Context | None = make_context(pooling)
        self._batch = Batch(self._context.max_tokens)
        self._decode_s = 0.0

    @property
    def times(self) -> StepTimes:
        return StepTimes(decode_s=self._decode_s)

    @property
    def context(self) -> Context:
        """The one that was used last, or is to be used."""
        return self._context_for(self._pooling)

    def open(self, request: Request) -> None:
        """The name of the lot of *request* is how its texts are pooled."""
        assert request.lot.name in set(Pooling)

    def close(self, request_id: int) -> SamplerUse | None:  # noqa: ARG002
        """Nothing was sampled."""
        return None

    def stop(self, request_id: int | None = None) -> None:
        """Abort a step that nobody wants. Thread: any."""
        self._gate.stop(request_id)

    def shutdown(self) -> None:
        """Free the context; no call may follow."""
        self._drop_context()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the texts of *plan*, which has no moves."""
        works = [work for work in plan.works if isinstance(work, Encode)]
        assert len(works) == len(plan.works)
        assert not plan.moves
        if not works:
            return StepResult()
        self._gate.enter(works)
        try:
            return self._run(works, Pooling(plan.lot.name))
        except DecodeAborted:
            self._clear()
            return StepResult(DecodeStatus.ABORTED)
        except NativeError as error:
            self._drop_context()
            return StepResult(DecodeStatus.FAILED, error=error)
        finally:
            self._gate.leave()

    def _run(self, works: list[Encode], pooling: Pooling) -> StepResult:
        context = self._context_for(pooling)
        self._fill(context, works)
        began = time.monotonic()
        context.decode(self._batch)
        decode_s = time.monotonic() - began
        self._decode_s += decode_s
        outputs = self._outputs(context, works)
        failed = [output for output in outputs if isinstance(output, RowFailed)]
        if failed:
            self._clear()
        if failed and len(works) > 1:
            return StepResult(DecodeStatus.INVALID, error=failed[0].error)
        if context.has_memory:
            for work in works:
                if work.is_last:
                    context.seq_rm(work.slot)
        return StepResult(outputs=outputs, decode_s=decode_s)

    def _fill(self, context: Context, works: list[Encode]) -> None:
        batch = self._batch
        batch.clear()
        for work in works:
            if context.has_memory and not work.pos:
                context.seq_rm(work.slot)  # its text may have been given up
            batch.add_scored(work.tokens, work.pos, work.slot)

    def _outputs(self, context: Context, works: list[Encode]) -> tuple[Output, ...]:
        outputs: list[Output] = []
        row = 0
        for work in works:
            end = row + len(work.tokens)
            if not work.is_last:
                outputs.append(Computed())
            elif self._pooling is Pooling.NONE:
                outputs.append(_checked(context.token_vectors(row, end)))
            else:
                outputs.append(_checked(context.vector(work.slot)))
            row = end
        return tuple(outputs)

    def _context_for(self, pooling: Pooling) -> Context:
        if self._context is None or pooling is not self._pooling:
            self._drop_context()
            self._context = self._make_context(pooling)
            self._pooling = pooling
        return self._context

    def _clear(self) -> None:
        if self._context is not None and self._context.has_memory:
            self._context.clear()

    def _drop_context(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()


def _checked(values: bytes) -> Vector | RowFailed:
    import numpy as np

    if np.isfinite(np.frombuffer(values, np.float32)).all():
        return Vector(values)
    return RowFailed(EmbeddingFailed())


def probe(context: Context) -> None:
    """
    Compute two tokens in one thread, where a failed assertion is an error.

    Raises:
        NativeError: libllama cannot compute the model.
    """
    batch = Batch(2)
    token = context.model.vocab.bos or 0
    batch.add_scored(array("i", [token, token]), 0, 0)
    with context.one_thread():
        context.decode(batch)
    if context.has_memory:
        context.clear()
