"""
From sampling parameters to what samples the rows of a request.

The order is that of llama-server: biases, the stages as given, then one draw. Greedy
requests keep only the stages that can change which token is the most likely; without any
they need no chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from pyllama_raw.engine.guidance import MaskState
from pyllama_raw.native import stages
from pyllama_raw.native.grammar import Grammar
from pyllama_raw.native.sampler import FIRST_MAX, RowSampler, SamplerChain, TokenTable
from pyllama_raw.native.stages import Stage
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.options.sampling import SamplingParams


class NamedTokens(NamedTuple):
    """The tokens that a request names, for all of its outputs."""

    suppress: TokenTable
    bias: TokenTable

    @classmethod
    def of(cls, params: SamplingParams, vocab: Vocab) -> Self:
        suppress = {*params.suppress_tokens, *vocab.suppress_tokens}
        if params.ignore_eos:
            suppress |= vocab.eog_tokens
        return cls(
            TokenTable("suppress_tokens", sorted(suppress)),
            TokenTable("logit_bias", params.logit_bias),
        )


def open_sampler(
    params: SamplingParams,
    vocab: Vocab,
    prompt: array[int],
    ending: frozenset[int],
    constraint: Grammar | MaskState | None,
    *,
    named: NamedTokens | None = None,
) -> RowSampler:
    """
    Build the sampler of a request, with what its penalties see of the prompt.

    Args:
        params: its seed is resolved.
        prompt: its text; nobody repeats an image.
        ending: tokens that end the request.
        constraint: of this request alone; a grammar is closed with the sampler.
        named: of *params*; None: it is made here, where there are few tokens.

    Raises:
        RequestError: the model or libllama cannot do what is asked.
    """
    grammar = constraint if isinstance(constraint, Grammar) else None
    mask = constraint.mask if isinstance(constraint, MaskState) else None
    suppress, bias = named or NamedTokens.of(params, vocab)
    n_ctx = min(vocab.n_ctx_train, stages.HISTORY_MAX)
    reach = Reach(min(len(prompt) + params.max_tokens, stages.HISTORY_MAX), n_ctx)
    chain: SamplerChain | None = None
    n_first = 0  # the size of the top-k that it begins with
    if wanted := stages_of(params, reach):
        chain = SamplerChain.build(wanted, vocab)
        if n_history := params.n_history(reach.n_most):
            chain.accept(prompt[-n_history:])
        if isinstance(wanted[0], stages.TopK) and wanted[0].k <= FIRST_MAX:
            n_first = wanted[0].k
    return RowSampler(
        chain,
        suppress,
        ending=sorted(ending) if params.min_tokens else (),
        n_min=params.min_tokens,
        bias=bias,
        grammar=grammar,
        mask=mask,
        n_first=n_first,
    )


class Reach(NamedTuple):
    """The longest history that makes sense, in tokens."""

    n_most: int  # of this request
    n_ctx: int  # of the model


def stages_of(params: SamplingParams, reach: Reach) -> list[Stage]:
    """
    The chain for *params*; empty where it would be the largest logit.
    """
    seed = params.seed
    assert seed is not None
    names: Sequence[str] = params.stages
    if params.greedy:
        names = _before_greedy(params)
    elif params.mirostat:
        names = ("temperature",)
    found = [stage for name in names if (stage := _STAGES[name](params, reach))]
    if params.greedy:
        return [*found, stages.Greedy()] if found else []
    if params.mirostat:
        tau, eta = params.mirostat_tau, params.mirostat_eta
        return [*found, stages.Mirostat(params.mirostat, tau, eta, seed)]
    if params.adaptive_target is not None:
        target, decay = params.adaptive_target, params.adaptive_decay
        return [*found, stages.AdaptiveP(target, decay, seed)]
    return [*found, stages.Draw(seed)]


def _before_greedy(params: SamplingParams) -> Sequence[str]:
    """The stages that decide which token is the most likely; none if it is the logit."""
    if params.mirostat:
        return ()
    names = params.stages
    if params.is_cold and "temperature" in names:
        names = names[: names.index("temperature")]
    drops_best = {
        "typical": params.typical_p < 1,
        "xtc": params.xtc_probability > 0,
        "infill": True,
    }
    if any(drops_best.get(name, False) for name in names):
        return [name for name in names if name != "temperature"]
    return [name for name in names if name in ("penalties", "dry")]


def _penalties(params: SamplingParams, reach: Reach) -> Stage | None:
    if not params.penalizes:
        return None
    return stages.Penalties(
        _history(params.penalty_last_n, reach.n_most),
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def dry_stage(params: SamplingParams, n_ctx: int) -> stages.Dry | None:
    """Equal for all requests with equal parameters, so that one can be kept; or None."""
    if not params.dries:
        return None
    return stages.Dry(
        _history(params.dry_last_n, n_ctx),
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        tuple(params.dry_sequence_breakers),
    )


def _history(limit: int | None, n_most: int) -> int:
    return n_most if limit is None else min(limit, n_most)


def _xtc(params: SamplingParams, reach: Reach) -> Stage | None:  # noqa: ARG001
    probability, threshold = params.xtc_probability, params.xtc_threshold
    if probability == 0 or threshold > 0.5:
        return None
    assert params.seed is not None
    return stages.Xtc(probability, threshold, params.seed, params.min_keep)


def _temperature(params: SamplingParams, reach: Reach) -> Stage | None:  # noqa: ARG001
    spread = 0.0 if params.mirostat else params.dynatemp_range
    if params.temperature == 1 and spread == 0:
        return None
    return stages.Temperature(params.temperature, spread, params.dynatemp_exponent)


_STAGES: dict[str, Callable[[SamplingParams, Reach], Stage | None]] = {
    "penalties": _penalties,
    "dry": lambda p, reach: dry_stage(p, reach.n_ctx),
    "top_n_sigma": lambda p, _: (
        stages.TopNSigma(p.top_n_sigma) if p.top_n_sigma else None
    ),
    "top_k": lambda p, _: stages.TopK(p.top_k) if p.top_k else None,
    "typical": lambda p, _: (
        stages.Nucleus("typical", p.typical_p, p.min_keep) if p.typical_p < 1 else None
    ),
    "top_p": lambda p, _: (
        stages.Nucleus("top_p", p.top_p, p.min_keep) if p.top_p < 1 else None
    ),
    "min_p": lambda p, _: (
        stages.Nucleus("min_p", p.min_p, p.min_keep) if p.min_p else None
    ),
    "xtc": _xtc,
    "temperature": _temperature,
    "infill": lambda p, _: stages.Infill(p.top_k),
}
