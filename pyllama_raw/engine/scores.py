"""
Log-probabilities, for the requests that ask for them.

Those of output tokens are written by the row's sampler; those of prompt tokens are read
from output rows that nothing was sampled from.
"""

from __future__ import annotations

from array import array

from pyllama_raw.core.request import TokenLogprobs
from pyllama_raw.core.step import Chunk, StepResult
from pyllama_raw.engine.open_requests import OpenRequest, OpenRequests
from pyllama_raw.native.context import Context
from pyllama_raw.native.logprobs import RowLogprobs
from pyllama_raw.native.sampler import RowSampler
from pyllama_raw.sampling.params import SamplingParams


def watch(params: SamplingParams, sampler: RowSampler) -> RowLogprobs | None:
    """Let *sampler* write what *params* ask for; None: nothing, or each is certain."""
    if params.logprobs is None:
        return None
    of_sampler = params.logprobs_of == "sampler"
    if of_sampler and params.greedy:
        return None
    row = RowLogprobs(params.logprobs, of_sampler=of_sampler)
    sampler.watch(row)
    return row


def with_logprobs(
    result: StepResult,
    chunks: tuple[Chunk, ...],
    opened: OpenRequests,
    context: Context,
) -> StepResult:
    """*result* with the log-probabilities of *chunks*, which the batch held."""
    rows = (chunk.request_id for chunk in chunks if chunk.wants_output)
    logprobs = {
        request_id: _of_output(opened[request_id], token)
        for request_id, token in zip(rows, result.tokens, strict=True)
        if token is not None and opened[request_id].params.logprobs is not None
    }
    scores = {}
    start = 0
    for chunk in chunks:
        if chunk.targets is not None:
            n_top = opened[chunk.request_id].params.prompt_logprobs
            scores[chunk.request_id] = _of_targets(
                chunk.targets, n_top or 0, start, context
            )
        start += len(chunk.tokens)
    return result._replace(logprobs=logprobs, scores=scores)


def _of_output(opened: OpenRequest, token: int) -> TokenLogprobs:
    row = opened.logprobs
    if row is None:
        return TokenLogprobs(token, 0.0, ((token, 0.0),))
    return TokenLogprobs(token, row.value, row.top)


def _of_targets(
    targets: array[int], n_top: int, start: int, context: Context
) -> tuple[TokenLogprobs, ...]:
    rows = array("i", range(start, start + len(targets)))
    chosen, ids, values = context.score(rows, array("i", targets), n_top)
    tops = [slice(n_top * i, n_top * (i + 1)) for i in range(len(targets))]
    return tuple(
        TokenLogprobs(token, logprob, _pairs(ids[top], values[top]))
        for token, logprob, top in zip(targets, chosen, tops, strict=True)
    )


def _pairs(ids: array[int], values: array[float]) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, values, strict=True)
    return tuple((token, value) for token, value in pairs if token >= 0)
