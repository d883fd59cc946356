"""
Log-probabilities, for the requests that ask for them.

Those of output tokens are written by the row's sampler; those of prompt tokens are read
from output rows that nothing was sampled from.
"""

from __future__ import annotations

from array import array

from pyllama_raw.core.request import TokenLogprobs
from pyllama_raw.core.step import Chunk, StepResult
from pyllama_raw.native.context import Context
from pyllama_raw.native.logprobs import RowLogprobs
from pyllama_raw.native.sampler import RowSampler
from pyllama_raw.sampling.params import SamplingParams


class Scores:
    """Who asks for what; false if nobody does, and then nothing is to be called."""

    def __init__(self) -> None:
        # By request_id; None: each token was certain.
        self._outputs: dict[int, RowLogprobs | None] = {}
        self._n_top_prompt: dict[int, int] = {}  # by request_id

    def __bool__(self) -> bool:
        return bool(self._outputs or self._n_top_prompt)

    def open(
        self, request_id: int, params: SamplingParams, sampler: RowSampler
    ) -> None:
        """Let *sampler* write what *params* ask for."""
        if params.prompt_logprobs is not None:
            self._n_top_prompt[request_id] = params.prompt_logprobs
        if params.logprobs is None:
            return
        of_sampler = params.logprobs_of == "sampler"
        row = None
        if not (of_sampler and params.greedy):
            row = RowLogprobs(params.logprobs, of_sampler=of_sampler)
            sampler.watch(row)
        self._outputs[request_id] = row

    def close(self, request_id: int) -> None:
        """Forget a request; unknown ids are ignored."""
        self._outputs.pop(request_id, None)
        self._n_top_prompt.pop(request_id, None)

    def add(
        self, result: StepResult, chunks: tuple[Chunk, ...], context: Context
    ) -> StepResult:
        """*result* with the log-probabilities of *chunks*, which the batch held."""
        rows = (chunk for chunk in chunks if chunk.wants_output)
        logprobs = {
            chunk.request_id: self._of_output(chunk.request_id, token)
            for chunk, token in zip(rows, result.tokens, strict=True)
            if token is not None and chunk.request_id in self._outputs
        }
        scores = {}
        start = 0
        for chunk in chunks:
            if chunk.targets is not None:
                scores[chunk.request_id] = self._of_targets(chunk, start, context)
            start += len(chunk.tokens)
        return result._replace(logprobs=logprobs, scores=scores)

    def _of_output(self, request_id: int, token: int) -> TokenLogprobs:
        row = self._outputs[request_id]
        if row is None:
            return TokenLogprobs(token, 0.0, ((token, 0.0),))
        return TokenLogprobs(token, row.value, row.top)

    def _of_targets(
        self, chunk: Chunk, start: int, context: Context
    ) -> tuple[TokenLogprobs, ...]:
        assert chunk.targets is not None
        targets = array("i", chunk.targets)
        rows = array("i", range(start, start + len(targets)))
        n_top = self._n_top_prompt[chunk.request_id]
        chosen, ids, values = context.score(rows, targets, n_top)
        tops = [slice(n_top * i, n_top * (i + 1)) for i in range(len(targets))]
        return tuple(
            TokenLogprobs(token, logprob, _pairs(ids[top], values[top]))
            for token, logprob, top in zip(targets, chosen, tops, strict=True)
        )


def _pairs(ids: array[int], values: array[float]) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, values, strict=True)
    return tuple((token, value) for token, value in pairs if token >= 0)
