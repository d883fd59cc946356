"""
Works as rows of the batch, and what was sampled of rows as outputs of works.

The batch is filled by slices, because there is a row for every token of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyllama_raw.core.step import (
    Computed,
    Decode,
    Output,
    PrefillSpan,
    RowFailed,
    Sampled,
    ScoredPrefill,
    Work,
)
from pyllama_raw.engine.built_samplers import BuiltSamplers
from pyllama_raw.engine.guidance import MaskState
from pyllama_raw.engine.scores import with_logprobs
from pyllama_raw.errors import BadGrammar, PyllamaError, SamplingFailed
from pyllama_raw.native.batch import Batch, RowBatch
from pyllama_raw.native.context import Context, StepOutcome
from pyllama_raw.native.libllama import last_error
from pyllama_raw.native.sampler import RowSamplers
from pyllama_raw.options.constraints import refusal, refused

GRAMMAR = "grammar: "  # begins what _ffi/grammar says


class _Tokens(dict[int, Sampled]):
    """A token as an output: each is made once, because there is one a row and step."""

    def __missing__(self, token: int) -> Sampled:
        sampled = self[token] = Sampled((token,))
        return sampled


class Rows:
    """The one batch of an executor, and the samplers of its rows."""

    def __init__(self, opened: BuiltSamplers, max_tokens: int, n_seq_max: int) -> None:
        self.batch = Batch(max_tokens)
        self.samplers = RowSamplers(n_seq_max)
        self._open = opened
        self._tokens = _Tokens()

    def fill(self, works: tuple[Work, ...]) -> None:
        """Have the batch hold *works*."""
        batch = self.batch
        batch.clear()
        n_rows = _count_decodes(works)
        decodes = works[:n_rows]
        batch.add_rows(
            [work.tokens[0] for work in decodes],
            [work.pos for work in decodes],
            [work.slot for work in decodes],
        )
        samplers = [self._open[work.request_id].sampler for work in decodes]
        for work in works[n_rows:]:
            add = batch.add_scored if type(work) is ScoredPrefill else batch.add
            add(work.tokens, work.pos, work.slot, work.samples)
            if work.samples:
                samplers.append(self._open[work.request_id].sampler)
        self.samplers.set_all(samplers)

    def compute_spans(self, works: tuple[Work, ...], context: Context) -> StepOutcome:
        """Compute rows of spans: all causal, or one whole span."""
        batch: RowBatch | None = None
        for work in works:
            assert isinstance(work, PrefillSpan)
            span = self._open[work.request_id].spans[work.span]
            run, width = span.run, context.model.n_embd_inp
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
            mask = self._open[work.request_id].mask
            if mask is not None and work.samples:
                mask.prepare()

    def outputs(
        self, works: tuple[Work, ...], outcome: StepOutcome, context: Context
    ) -> tuple[Output, ...]:
        """One of each of *works*, which the batch held."""
        outputs: Iterator[Output] = map(self._tokens.__getitem__, outcome.tokens)
        if self._open.n_masked or outcome.codes:
            outputs = self._checked(works, outcome)
        if len(outcome.tokens) < len(works):
            rows, computed = outputs, Computed()
            outputs = (next(rows) if work.samples else computed for work in works)
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
            mask = self._open[work.request_id].mask
            if code:
                yield RowFailed(_error(mask, code))
            else:
                if mask is not None:
                    mask.accept(token)
                yield Sampled((token,))


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


def _count_decodes(works: tuple[Work, ...]) -> int:
    """Number of works at the front that are a decode of one token."""
    for index, work in enumerate(works):
        if type(work) is not Decode or len(work.tokens) != 1:
            return index
    return len(works)
