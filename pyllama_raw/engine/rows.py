"""
Works as rows of the batch, and what was sampled of rows as outputs.

Rules:
1. The batch is filled by slices, because there is a row for every token of a stream.
2. Few requests need more of a step than their token. Counts say whether any is open, so that a
   step without one looks at nobody.
3. Log-probabilities of output tokens are written by the row's sampler. Those of prompt tokens
   are read from output rows that nothing was sampled from.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from pyllama_raw.core.request import TokenLogprobs
from pyllama_raw.core.step import (
    Computed,
    Decode,
    Output,
    PrefillSpan,
    RowFailed,
    Sampled,
    Scored,
    ScoredPrefill,
    Verify,
    Work,
)
from pyllama_raw.engine.guidance import MaskState
from pyllama_raw.engine.sampling import BuiltSampler, BuiltSamplers
from pyllama_raw.errors import BadGrammar, InvalidRequest, PyllamaError, SamplingFailed
from pyllama_raw.native.batch import Batch, RowBatch
from pyllama_raw.native.context import Context, StepOutcome
from pyllama_raw.native.libllama import EXCEPTION, last_error
from pyllama_raw.native.sampler import RowSampler, RowSamplers
from pyllama_raw.options.constraints import refusal, refused

if TYPE_CHECKING:
    pass

NO_TOKEN = -1
MAX_FORCED = 16  # tokens that a constraint lets follow
GRAMMAR = "grammar: "  # begins what _ffi/grammar says


def with_logprobs(
    outputs: Iterable[Output],
    works: Items[Work],
    samplers: BuiltSamplers,
    context: Context,
) -> tuple[Output, ...]:
    """*outputs* with the log-probabilities of *works*, which the batch held."""
    scored = []
    start = 0
    for work, output in zip(works, outputs, strict=True):
        request = samplers.by_id[work.request_id]
        # An output token: the sampler of its row has written them.
        if type(output) is Sampled and request.params.logprobs is not None:
            rows = tuple(
                _of_output(request, token, place)
                for place, token in enumerate(output.tokens)
            )
            output = output._replace(logprobs=rows)  # noqa: PLW2901
        # Tokens of a prompt that is scored: read from the rows of the chunk.
        if type(work) is ScoredPrefill:
            assert isinstance(output, Sampled | RowFailed | Computed)
            n_top = request.params.prompt_logprobs or 0
            try:
                first = start + work.n_plain
                scores = _of_targets(work.targets, n_top, first, context)
            # A row without numbers fails its request alone.
            except InvalidRequest:
                failed = SamplingFailed("plr_score", EXCEPTION, last_error())
                output = RowFailed(failed)  # noqa: PLW2901
            else:
                output = Scored(scores, output)  # noqa: PLW2901
        scored.append(output)
        start += len(work.tokens)
    return tuple(scored)


def _of_output(sampler: BuiltSampler, token: int, place: int) -> TokenLogprobs:
    row = sampler.logprobs
    if row is None:
        return TokenLogprobs(token, 0.0, ((token, 0.0),))
    return TokenLogprobs(token, row.value_at(place), row.top_at(place))


def _of_targets(
    targets: array[int], n_top: int, start: int, context: Context
) -> tuple[TokenLogprobs, ...]:
    rows = array("i", range(start, start + len(targets)))
    logprobs, ids, values = context.score(rows, array("i", targets), n_top)
    tops = [slice(n_top * i, n_top * (i + 1)) for i in range(len(targets))]
    scores = []
    for token, logprob, top in zip(targets, logprobs, tops, strict=True):
        pairs = zip(ids[top], values[top], strict=True)
        scores.append(
            TokenLogprobs(token, logprob, tuple(p for p in pairs if p[0] >= 0))
        )
    return tuple(scores)


class _Tokens(dict[int, Sampled]):
    """A token as an output: each is made once, because there is one a row and step."""

    def __missing__(self, token: int) -> Sampled:
        sampled = self[token] = Sampled((token,))
        return sampled


class Rows:
    """The one batch of an executor, and the samplers of its rows."""

    def __init__(self, samplers: BuiltSamplers, max_tokens: int, max_rows: int) -> None:
        self.batch = Batch(max_tokens)
        self.samplers = RowSamplers(max_rows)
        self._open = samplers
        self._n_places: list[int] = []  # rows of each work that is to be verified
        self._with_masks: list[
            tuple[RowSampler, MaskState]
        ] = []  # of each of its places
        self._tokens = _Tokens()

    def fill(self, works: tuple[Work, ...]) -> None:
        """Have the batch hold *works*."""
        batch, built = self.batch, self._open.by_id
        self._n_places = []
        while self._with_masks:
            sampler, mask = self._with_masks.pop()
            sampler.use_masks(mask.mask)
        # Decodes come first in a plan: one row each, by slices of three arrays.
        n_rows = 0
        for work in works:
            if type(work) is not Decode or len(work.tokens) != 1:
                break
            n_rows += 1
        decodes = works[:n_rows]
        batch.clear()
        batch.add_rows(
            [work.tokens[0] for work in decodes],
            [work.pos for work in decodes],
            [work.slot for work in decodes],
        )
        samplers = [built[work.request_id].sampler for work in decodes]
        # Chunks of prompts: rows of all tokens that are scored, else of the last one, if at all.
        for work in works[n_rows:]:
            if type(work) is Verify:
                samplers += self._add_drafts(work)
                continue
            tokens, pos = work.tokens, work.pos
            add = batch.add
            if type(work) is ScoredPrefill:
                if n_plain := work.n_plain:
                    batch.add(tokens[:n_plain], pos, work.slot, False)
                    tokens, pos = tokens[n_plain:], pos + n_plain
                add = batch.add_scored
            add(tokens, pos, work.slot, work.samples)
            if work.samples:
                samplers.append(built[work.request_id].sampler)
        self.samplers.set_all(samplers)

    def _add_drafts(self, work: Verify) -> list[RowSampler]:
        """Add the rows of *work* to the batch; returns the sampler of each."""
        built, tokens = self._open.by_id[work.request_id], work.tokens
        # Each place has its mask. What the constraint refuses is no draft.
        if built.mask is not None:
            n_drafts = built.mask.prepare_places(tokens[1:])
            tokens = tokens[: 1 + n_drafts]
            built.sampler.use_masks(built.mask.masks)
            self._with_masks.append((built.sampler, built.mask))
        self.batch.add_drafts(tokens, work.pos, work.slot)
        self._n_places.append(len(tokens))
        return [built.sampler] * len(tokens)

    def starts(self, works: tuple[Work, ...]) -> Iterator[int]:
        """Place of the first token of each of *works* in the batch."""
        start, n_places = 0, iter(self._n_places)
        for work in works:
            yield start
            start += next(n_places) if type(work) is Verify else len(work.tokens)

    def compute_spans(self, works: tuple[Work, ...], context: Context) -> StepOutcome:
        """Compute rows of spans: all causal, or one whole span."""
        # They have another batch, so nothing of this one is in the step: no drafts either.
        self.batch.clear()
        batch: RowBatch | None = None
        for work in works:
            assert isinstance(work, PrefillSpan)
            span = self._open.by_id[work.request_id].spans[work.span]
            run, width = span.run, context.model.n_embd_inp
            # All works of such a step have rows of one shape.
            if batch is None:
                n_sections = len(run.positions)
                batch = RowBatch(width, n_sections, is_causal=run.is_causal)
            stop = work.start + len(work.tokens)
            rows = span.rows[work.start * width : stop * width]
            batch.add(rows, run.positions_at(work.pos, work.start, stop), work.slot)
        assert batch is not None
        return context.step(batch, self.samplers)

    def read_sources(self, works: tuple[Work, ...], context: Context) -> StepOutcome:
        """Have the encoder read the sources of *works*."""
        self.batch.clear()
        for work in works:
            self.batch.add_scored(work.tokens, work.pos, work.slot)
        return context.read_sources(self.batch)

    def prepare_masks(self, works: tuple[Work, ...]) -> None:
        """Have the masks of *works* made while they are decoded."""
        for work in works:
            mask = self._open.by_id[work.request_id].mask
            if mask is not None and work.samples and type(work) is not Verify:
                mask.prepare()

    def outputs(
        self, works: tuple[Work, ...], outcome: StepOutcome, context: Context
    ) -> tuple[Output, ...]:
        """One of each of *works*, which the batch held."""
        # Nearly always: a token a row, and each output of a token is made once.
        outputs: Iterator[Output] = map(self._tokens.__getitem__, outcome.tokens)
        # Rows of drafts are sampled up to the first that is wrong.
        if self.batch.has_drafts:
            outputs = self._verified(works, outcome)
        # A constraint has to take each token, or a row has failed.
        elif self._open.n_masked or outcome.codes:
            outputs = self._checked(works, outcome)
        # Works that end before their prompt does have no row.
        if len(outcome.tokens) < len(works):
            rows, computed = outputs, Computed()
            outputs = (next(rows) if work.samples else computed for work in works)
        # Somebody asks for log-probabilities.
        if self._open.n_scored:
            return with_logprobs(outputs, works, self._open, context)
        return tuple(outputs)

    def _checked(
        self, works: tuple[Work, ...], outcome: StepOutcome
    ) -> Iterator[Output]:
        """Outputs of rows, once their masks have taken the tokens: rows may have failed."""
        sampling = [work for work in works if work.samples]
        codes = outcome.codes or [0] * len(sampling)
        for work, token, code in zip(sampling, outcome.tokens, codes, strict=True):
            mask = self._open.by_id[work.request_id].mask
            if code:
                yield RowFailed(_error(mask, code))
            else:
                forced = self._taken(work, (token,)) if mask is not None else ()
                yield Sampled((token,), (), forced)

    def _verified(
        self, works: tuple[Work, ...], outcome: StepOutcome
    ) -> Iterator[Output]:
        """Outputs of a step with drafts: each work samples in one place or in several."""
        start, n_places = 0, iter(self._n_places)
        for work in works:
            stop = start + (next(n_places) if type(work) is Verify else 1)
            tokens = outcome.tokens[start:stop]
            # Places behind a wrong draft have none. One that failed fails again in the next
            # step, as the first one of it.
            tokens = tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
            mask = self._open.by_id[work.request_id].mask
            if not tokens:
                yield RowFailed(_error(mask, outcome.codes[start]))
            else:
                sampled = tuple(tokens)
                forced = self._taken(work, sampled) if mask is not None else ()
                yield Sampled(sampled, (), forced)
            start = stop

    def _taken(self, work: Work, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Have the mask of *work* take *tokens*; returns what it lets follow."""
        built = self._open.by_id[work.request_id]
        assert built.mask is not None
        for token in tokens:
            built.mask.accept(token)
        return built.mask.forced(MAX_FORCED) if built.is_drafted else ()


def _error(mask: MaskState | None, code: int) -> PyllamaError:
    """What ends a request whose row failed with *code*."""
    if mask is not None and mask.error:
        # It can be compiled, but not followed further within the limits of one mask.
        return refused(mask.kind, mask.error)
    message = last_error() or "the sampler failed"
    if message.startswith(GRAMMAR):
        reason = refusal("lark", message.removeprefix(GRAMMAR)).reason
        return BadGrammar(reason, None)
    return SamplingFailed("llama_sampler_sample", code, message)
