"""What a caller gets back. All of it is frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, exp, fsum

from pyllama_raw.core import request as core
from pyllama_raw.core.request import (
    CacheTier,
    FinishDetail,
    FinishReason,
    SamplerUse,
    TokenLogprobs,
)
from pyllama_raw.core.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Delta:
    """
    What was generated since the last one.

    text may be empty while a character or a stop string is incomplete, and token_ids
    may be empty when held back text comes at the end.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # which of the n outputs
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that were not computed
    cache_tier: CacheTier | None = None  # where they came from: live, host, disk


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one request in seconds; None if it never came to that."""

    queue_s: float | None  # submitted to admitted
    ttft_s: float | None  # submitted to first output token
    itl_p50_s: float | None  # gap between output tokens
    itl_p99_s: float | None
    tpot_s: float | None  # mean gap
    e2e_s: float  # submitted to finished
    itl_s: tuple[float, ...] = field(default=(), repr=False)  # every gap, in order


@dataclass(frozen=True, slots=True)
class Result:
    """One finished output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int  # the one given, or the one that was drawn; plus index
    index: int = 0  # which of the n outputs
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)  # one a token
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(
        default=(), repr=False
    )  # of prompt tokens 1, 2, ...; index 0 has them
    sampler: SamplerUse | None = None  # where its tokens were chosen; None: none were
    finish_detail: FinishDetail | None = None  # which stop, which limit; else None


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a text."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # of token_ids[1:], each after all before it

    @property
    def total(self) -> float:
        """Natural logarithm of the probability of all tokens after the first."""
        return fsum(item.logprob for item in self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; 1 is certain."""
        return exp(-self.total / len(self.logprobs))


@dataclass(frozen=True, slots=True)
class EngineStats(SchedulerStats):
    """The engine after its latest step, and all totals."""

    decode_s: float  # total time in llama_decode
    sample_s: float  # total time choosing tokens
    capture_s: float  # total time copying slots to host memory, for the cache
    restore_s: float  # and back
    dropped_steps: int  # begun ahead, and then others were wanted; not among steps
    lane_attaches: int  # chains that were given to a slot, to run on the backend
    lane_reserves: int  # steps that prepared all graphs anew, as lanes had changed
    lane_fallbacks: int  # requests sampled on the host, though lanes are wanted


def timings_of(moments: core.Timings) -> Timings:
    """Durations between the *moments* the scheduler wrote down."""
    start, gaps = moments.submitted, sorted(moments.itl)
    return Timings(
        queue_s=None if moments.admitted is None else moments.admitted - start,
        ttft_s=None if moments.first_token is None else moments.first_token - start,
        itl_p50_s=_percentile(gaps, 50),
        itl_p99_s=_percentile(gaps, 99),
        tpot_s=sum(gaps) / len(gaps) if gaps else None,
        e2e_s=moments.finished - start,
        itl_s=moments.itl,
    )


def _percentile(ordered: list[float], percent: int) -> float | None:
    """The smallest value that *percent* of *ordered* do not exceed."""
    if not ordered:
        return None
    return ordered[ceil(len(ordered) * percent / 100) - 1]
