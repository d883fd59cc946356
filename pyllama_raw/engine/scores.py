"""
Log-probabilities, for the requests that ask for them.

Those of output tokens are written by the row's sampler; those of prompt tokens are read
from output rows that nothing was sampled from.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items

from pyllama_raw.core.request import TokenLogprobs
from pyllama_raw.core.step import (
    Computed,
    Output,
    RowFailed,
    Sampled,
    Scored,
    ScoredPrefill,
    Work,
)
from pyllama_raw.engine.built_samplers import BuiltSampler, BuiltSamplers
from pyllama_raw.errors import InvalidRequest, SamplingFailed
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import EXCEPTION, last_error
from pyllama_raw.native.sampler import RowLogprobs, RowSampler
from pyllama_raw.options.sampling import SamplingParams


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
    outputs: Iterable[Output],
    works: Items[Work],
    opened: BuiltSamplers,
    context: Context,
) -> tuple[Output, ...]:
    """*outputs* with the log-probabilities of *works*, which the batch held."""
    told = []
    start = 0
    for work, output in zip(works, outputs, strict=True):
        request = opened[work.request_id]
        if type(output) is Sampled and request.params.logprobs is not None:
            rows = tuple(_of_output(request, token) for token in output.tokens)
            output = Sampled(output.tokens, rows)  # noqa: PLW2901
        if type(work) is ScoredPrefill:
            assert isinstance(output, Sampled | RowFailed | Computed)
            n_top = request.params.prompt_logprobs or 0
            try:
                scores = _of_targets(work.targets, n_top, start, context)
            except InvalidRequest:
                failed = SamplingFailed("plr_score", EXCEPTION, last_error())
                output = RowFailed(failed)  # noqa: PLW2901
            else:
                output = Scored(scores, output)  # noqa: PLW2901
        told.append(output)
        start += len(work.tokens)
    return tuple(told)


def _of_output(opened: BuiltSampler, token: int) -> TokenLogprobs:
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
    found = []
    for token, logprob, top in zip(targets, chosen, tops, strict=True):
        pairs = zip(ids[top], values[top], strict=True)
        found.append(
            TokenLogprobs(token, logprob, tuple(p for p in pairs if p[0] >= 0))
        )
    return tuple(found)
