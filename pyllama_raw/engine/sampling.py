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
    chain, n_first = _chain(params, vocab, prompt)
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


def _chain(
    params: SamplingParams, vocab: Vocab, prompt: array[int]
) -> tuple[SamplerChain | None, int]:
    """The chain, and the size of the top-k it begins with; 0: it does not."""
    n_ctx = min(vocab.n_ctx_train, stages.HISTORY_MAX)
    reach = Reach(min(len(prompt) + params.max_tokens, stages.HISTORY_MAX), n_ctx)
    wanted = stages_of(params, reach)
    if not wanted:
        return None, 0
    chain = SamplerChain.build(wanted, vocab)
    n_history = params.n_history(reach.n_most)
    if n_history:
        chain.accept(prompt[-n_history:])
    return chain, _n_first(wanted[0])


def _n_first(stage: Stage) -> int:
    k = stage.k if isinstance(stage, stages.TopK) else 0
    return k if k <= FIRST_MAX else 0


class Reach(NamedTuple):
    """The longest history that makes sense, in tokens."""

    n_most: int  # of this request
    n_ctx: int  # of the model


def stages_of(params: SamplingParams, reach: Reach) -> list[Stage]:
    """
    The chain for *params*; empty where it would be the largest logit.
    """
    assert params.seed is not None
    if params.mirostat and not params.greedy:
        return [
            *_temperature(params, reach),
            stages.Mirostat(
                params.mirostat, params.mirostat_tau, params.mirostat_eta, params.seed
            ),
        ]
    names: Sequence[str] = params.stages if not params.mirostat else ()
    if params.greedy:
        names = _before_greedy(params)
    found = [stage for name in names for stage in _STAGES[name](params, reach)]
    if params.greedy:
        return [*found, stages.Greedy()] if found else []
    if params.adaptive_target is not None:
        target, decay = params.adaptive_target, params.adaptive_decay
        return [*found, stages.AdaptiveP(target, decay, params.seed)]
    return [*found, stages.Draw(params.seed)]


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


def _penalties(params: SamplingParams, reach: Reach) -> list[Stage]:
    if not params.penalizes:
        return []
    last_n = _history(params.penalty_last_n, reach.n_most)
    return [
        stages.Penalties(
            last_n,
            params.repeat_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
    ]


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


def _xtc(params: SamplingParams, reach: Reach) -> list[Stage]:  # noqa: ARG001
    probability, threshold = params.xtc_probability, params.xtc_threshold
    if probability == 0 or threshold > 0.5:
        return []
    assert params.seed is not None
    return [stages.Xtc(probability, threshold, params.seed, params.min_keep)]


def _temperature(params: SamplingParams, reach: Reach) -> list[Stage]:  # noqa: ARG001
    spread = 0.0 if params.mirostat else params.dynatemp_range
    if params.temperature == 1 and spread == 0:
        return []
    exponent = params.dynatemp_exponent
    return [stages.Temperature(params.temperature, spread, exponent)]


_STAGES: dict[str, Callable[[SamplingParams, Reach], list[Stage]]] = {
    "penalties": _penalties,
    "dry": lambda p, reach: [dry] if (dry := dry_stage(p, reach.n_ctx)) else [],
    "top_n_sigma": lambda p, _: (
        [stages.TopNSigma(p.top_n_sigma)] if p.top_n_sigma else []
    ),
    "top_k": lambda p, _: [stages.TopK(p.top_k)] if p.top_k else [],
    "typical": lambda p, _: (
        [stages.Nucleus("typical", p.typical_p, p.min_keep)] if p.typical_p < 1 else []
    ),
    "top_p": lambda p, _: (
        [stages.Nucleus("top_p", p.top_p, p.min_keep)] if p.top_p < 1 else []
    ),
    "min_p": lambda p, _: (
        [stages.Nucleus("min_p", p.min_p, p.min_keep)] if p.min_p else []
    ),
    "xtc": _xtc,
    "temperature": _temperature,
    "infill": lambda p, _: [stages.Infill(p.top_k)],
}
