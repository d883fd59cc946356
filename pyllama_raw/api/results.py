"""Values that a caller gets back. All of them are frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, fsum, nan

from pyllama_raw.core import request as core
from pyllama_raw.core.request import (
    CacheTier,
    FinishDetail,
    FinishReason,
    SamplerUse,
    TokenLogprobs,
)
from pyllama_raw.core.stats import MediaStats, SchedulerStats, StepTimes
from pyllama_raw.engine.info import EngineState
from pyllama_raw.errors import shown
from pyllama_raw.replies.parser import Part, ToolCall


@dataclass(frozen=True, slots=True)
class Delta:
    """
    The text and tokens that were generated since the last delta.

    text may be empty while a character or a stop string is incomplete, and token_ids
    may be empty when held back text comes at the end.
    """

    text: str
    """The new text; empty while a character or a stop string is incomplete."""
    token_ids: tuple[int, ...]
    """The new tokens; none when text that was held back comes at the end."""
    index: int = 0
    """The index of the output that it belongs to, of n."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry a token, if asked for."""
    parts: tuple[Part, ...] = ()
    """
    The new content, reasoning and calls of tools, in their order, if the reply is taken apart;
    text is the content alone then.
    """


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens of the output."""
    cached_tokens: int
    """Prompt tokens that were not computed."""
    cache_tier: CacheTier | None = None
    """The place that the cached tokens came from; None if there are none."""
    media_tokens: int = 0
    """Prompt tokens that are rows of images and sounds."""
    reasoning_tokens: int = 0
    """Tokens of the output that are reasoning, if the reply is taken apart."""
    drafted_tokens: int = 0
    """Tokens that were computed before they were sampled, by speculation."""
    accepted_tokens: int = 0
    """Drafted tokens that were sampled."""

    def __add__(self, other: Usage) -> Usage:
        """The counts of both together; their place is told if it is the same."""
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cache_tier if self.cache_tier == other.cache_tier else None,
            self.media_tokens + other.media_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one request in seconds; None if it never came to that."""

    queue_s: float | None
    """Submitted to admitted."""
    ttft_s: float | None
    """Submitted to first output token."""
    itl_p50_s: float | None
    """Median gap between output tokens."""
    itl_p99_s: float | None
    """99th percentile of the gaps."""
    tpot_s: float | None
    """Mean of the gaps."""
    e2e_s: float
    """Submitted to finished."""
    itl_s: tuple[float, ...] = field(default=(), repr=False)
    """Every gap, in order; where the context was shifted, those of the latest tokens."""
    prefill_s: float | None = None
    """Admitted to first output token."""
    decode_s: float | None = None
    """First to last output token; None with fewer than two."""
    encode_s: float | None = None
    """Encodes of its images and sounds, which others may share; None: it has none."""


@dataclass(frozen=True, slots=True)
class Result:
    """One finished output."""

    text: str
    """The output without the stop string that ended it."""
    token_ids: tuple[int, ...]
    """The tokens of the output."""
    finish_reason: FinishReason
    """The reason why the output ended."""
    usage: Usage
    """Counts of tokens."""
    timings: Timings
    """Durations in seconds."""
    seed: int | None
    """
    The seed that was given or drawn, plus the index; None: a service has drawn one and does not
    tell it.
    """
    index: int = 0
    """The index of this output, of n."""
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    """One entry an output token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    """
    Entries of prompt tokens 1, 2, ..., if asked for; only the output with index 0 has them.
    """
    sampler: SamplerUse | None = None
    """The place where the tokens were chosen; None if there are none."""
    finish_detail: FinishDetail | None = None
    """The stop or limit that ended the output; None for any other reason."""
    reasoning: str = ""
    """Text that the model thought first, if the reply is taken apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that the model calls, if the reply is taken apart."""
    served_by: str | None = None
    """The name of the runner that served it; None: no runner did."""

    @property
    def calls_tools(self) -> bool:
        """Whether the model ended its turn with calls, all of which are whole."""
        calls = self.tool_calls
        ended = self.finish_reason is FinishReason.STOP
        return bool(calls) and ended and all(call.is_whole for call in calls)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens that were computed, by the time until the first output token."""
        n_computed = self.usage.prompt_tokens - self.usage.cached_tokens
        return _rate(n_computed, self.timings.prefill_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output tokens after the first one, by the time that they took."""
        return _rate(len(self.token_ids) - 1, self.timings.decode_s)

    def __repr__(self) -> str:
        detail = "" if self.finish_detail is None else f" ({self.finish_detail})"
        return (
            f"<Result {shown(self.text)}: {len(self.token_ids)} tokens, "
            f"{self.finish_reason}{detail}, seed {self.seed}>"
        )


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of a text for a model."""

    token_ids: tuple[int, ...]
    """The text as tokens."""
    logprobs: tuple[TokenLogprobs, ...]
    """Entries of token_ids[1:], each after all tokens before it."""

    def __repr__(self) -> str:
        return f"<Score of {len(self.token_ids)} tokens: {self.total:.2f} in all>"

    @property
    def total(self) -> float:
        """Natural logarithm of the probability of all tokens after the first."""
        return fsum(item.logprob for item in self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; 1 is certain."""
        return exp(-self.total / len(self.logprobs))


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The likelihood of one continuation of a prompt."""

    token_ids: tuple[int, ...]
    """
    The continuation as tokens. If it joins the end of the prompt to other tokens than the prompt
    alone has, these are the first.
    """
    logprobs: tuple[TokenLogprobs, ...]
    """An entry of each token, after the prompt and all tokens before it."""
    usage: Usage = field(repr=False)
    """Tokens of the prompt and the continuation together, and those that were not computed."""

    def __repr__(self) -> str:
        return f"<Likelihood of {len(self.token_ids)} tokens: {self.total:.2f} in all>"

    @property
    def total(self) -> float:
        """Natural logarithm of the probability of the whole continuation."""
        return fsum(item.logprob for item in self.logprobs)

    @property
    def per_token(self) -> float:
        """The mean of its tokens, so long continuations are not behind."""
        return self.total / len(self.logprobs)

    @property
    def per_byte(self) -> float:
        """The total by the bytes of its text, whatever tokens it has."""
        return self.total / max(sum(len(item.piece) for item in self.logprobs), 1)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one at its place; n_top of 1 or more tells."""
        return all(
            bool(item.top) and item.top[0][1] <= item.logprob for item in self.logprobs
        )


def softmax(logarithms: Sequence[float]) -> list[float]:
    """Probabilities in proportion to the exponentials of *logarithms*; they sum up to 1."""
    # Beside the largest one, because exp() of each alone could be 0.
    largest = max(logarithms)
    weights = [exp(value - largest) for value in logarithms]
    total = sum(weights)
    return [weight / total for weight in weights]


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label of a text, and what the model says of it."""

    index: int
    """Its place in the list that was given."""
    label: str
    """The label as it was given."""
    probability: float
    """Its part of the probability of all labels, which sum up to 1."""
    likelihood: Likelihood = field(repr=False)
    """The label as a continuation of the text."""


@dataclass(frozen=True, slots=True)
class EngineStats(MediaStats, StepTimes, SchedulerStats):
    """The engine after its latest step, and all totals."""

    state: EngineState = EngineState.READY
    """The state of the engine."""
    watcher_faults: int = 0
    """Watchers that raised, such as logs and metrics; they are told nothing more."""
    relaxed_schemas: int = 0
    """
    Schemas of tools that are not strict of which a part was left out, since no grammar has it; one
    a request and tool.
    """
    mended_chats: int = 0
    """Chats that the chat template took only changed, such as system messages later on."""
    queue_s: float | None = None
    """
    Seconds until a request that comes now has a slot, an estimate by the latest ones: 0 while
    a slot is free, None before any request has ended.
    """
    products: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """
    Multiply-adds with weights since the model was loaded, by the type of the weights, then by
    whose kernels computed them: "ours", "AMX", "libllama's, repacked" or "libllama's". Where there
    is a GPU it is empty.
    """


def timings_of(finished: core.Finished) -> Timings:
    """Durations between the moments that were written down."""
    moments = finished.timings
    start, gaps = moments.submitted, sorted(moments.itl)
    return Timings(
        queue_s=_between(start, moments.admitted),
        ttft_s=_between(start, moments.first_token),
        itl_p50_s=percentile(gaps, 50) if gaps else None,
        itl_p99_s=percentile(gaps, 99) if gaps else None,
        tpot_s=sum(gaps) / len(gaps) if gaps else None,
        e2e_s=moments.finished - start,
        itl_s=moments.itl,
        prefill_s=_between(moments.admitted, moments.first_token),
        decode_s=_between(moments.first_token, moments.last_token) if gaps else None,
        encode_s=finished.encode_s,
    )


def _rate(n: int, seconds: float | None) -> float | None:
    return n / seconds if seconds else None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest of *values* that *percent* of them do not exceed; nan if empty."""
    ordered = sorted(values)
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1] if ordered else nan


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document, and what the model says of it."""

    index: int
    """Its place in the list that was given."""
    score: float
    """The first of its scores: the higher, the better it answers the query."""
    scores: Mapping[str, float]
    """All of them, by the label that the model file has for each, or by its number."""
    n_tokens: int
    """Tokens of the query and the document, as one text."""
