"""
20,000 draws of the host chain for each stochastic stage, against numpy's distribution.

A chi-squared test tells draws from what a stage should leave from draws of a stage whose
number is a little off: each case has such a number and must refuse it. Stages with a state
are drawn from in the state after the same history, or at their first draw.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.engine.sampling import Reach, open_sampler, stages_of
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import SamplerChain
from pyllama_raw.native.stages import (
    AdaptiveP,
    Dry,
    Mirostat,
    Nucleus,
    Penalties,
    Stage,
    Temperature,
    TopK,
    TopNSigma,
    Xtc,
)
from tests.native.stage_reference import (
    Candidates,
    after,
    expected,
    infilled,
    mirostat_first,
    softmax,
)
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N = 48
N_DRAWS = 20_000
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 11}
REACH = Reach(1000, 1000)
SEEN = [3, 7, 3, 9, 1, 2, 3, 7, 5, 9, 1, 2, 3]
LOGITS = np.random.default_rng(3).normal(0, 1.2, N).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    with Model.load(tiny_model("llama")) as loaded:
        yield loaded


def chi_squared_is_low(counts: np.ndarray, p: np.ndarray) -> bool:
    """Whether *counts* look like draws from *p*; rare candidates are taken together."""
    if counts[p == 0].sum():
        return False
    wanted = p * counts.sum()
    often = wanted >= 8
    wanted = np.append(wanted[often], wanted[~often].sum())
    counts = np.append(counts[often], counts[~often].sum())
    seen = wanted > 0
    statistic = ((counts[seen] - wanted[seen]) ** 2 / wanted[seen]).sum()
    freedom = max(int(seen.sum()) - 1, 1)
    return bool(statistic < freedom + 4 * np.sqrt(2 * freedom) + 4)


@dataclass(frozen=True)
class Case:
    """Parameters, the stages they should be, and stages that are a little off."""

    params: dict[str, Any]
    right: list[Stage]
    wrong: list[Stage] = field(default_factory=list)


CASES = {
    "temperature": Case({"temperature": 0.7}, [Temperature(0.7)], [Temperature(0.74)]),
    "dynamic temperature": Case(
        {"temperature": 0.8, "dynatemp_range": 0.5, "dynatemp_exponent": 1.3},
        [Temperature(0.8, 0.5, 1.3)],
        [Temperature(0.8, 0.5, 1.0)],
    ),
    "top_k": Case({"top_k": 7}, [TopK(7)], [TopK(8)]),
    "top_p": Case({"top_p": 0.7}, [Nucleus("top_p", 0.7)], [Nucleus("top_p", 0.8)]),
    "min_p": Case({"min_p": 0.1}, [Nucleus("min_p", 0.1)], [Nucleus("min_p", 0.14)]),
    "typical": Case(
        {"typical_p": 0.8}, [Nucleus("typical", 0.8)], [Nucleus("typical", 0.85)]
    ),
    "min_keep": Case(
        {"top_p": 0.1, "min_keep": 5},
        [Nucleus("top_p", 0.1, 5)],
        [Nucleus("top_p", 0.1, 6)],
    ),
    "top_n_sigma": Case({"top_n_sigma": 1.0}, [TopNSigma(1.0)], [TopNSigma(1.3)]),
    "xtc": Case(
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        [Xtc(1.0, 0.05, 11)],
        [Xtc(1.0, 0.1, 11)],
    ),
    "repeat penalty": Case(
        {"repeat_penalty": 1.3}, [Penalties(64, 1.3)], [Penalties(64, 1.4)]
    ),
    "frequency penalty": Case(
        {"frequency_penalty": 0.4},
        [Penalties(64, frequency=0.4)],
        [Penalties(64, frequency=0.5)],
    ),
    "presence penalty": Case(
        {"presence_penalty": 0.7},
        [Penalties(64, presence=0.7)],
        [Penalties(64, presence=0.8)],
    ),
    "penalty_last_n": Case(
        {"presence_penalty": 0.7, "penalty_last_n": 4},
        [Penalties(4, presence=0.7)],
        [Penalties(5, presence=0.7)],
    ),
    "dry": Case(
        {"dry_multiplier": 0.5, "dry_base": 1.2, "dry_allowed_length": 1},
        [Dry(64, 0.5, 1.2, 1)],
        [Dry(64, 0.5, 1.2, 2)],
    ),
    "adaptive_p": Case(
        {"adaptive_target": 0.1}, [AdaptiveP(0.1, 0.9, 11)], [AdaptiveP(0.12, 0.9, 11)]
    ),
    "all": Case(
        {
            "repeat_penalty": 1.2,
            "top_k": 30,
            "top_p": 0.9,
            "min_p": 0.01,
            "temperature": 0.9,
        },
        [
            Penalties(64, 1.2),
            TopK(30),
            Nucleus("top_p", 0.9),
            Nucleus("min_p", 0.01),
            Temperature(0.9),
        ],
        [
            Temperature(0.9),
            Penalties(64, 1.2),
            TopK(30),
            Nucleus("top_p", 0.9),
            Nucleus("min_p", 0.01),
        ],
    ),
}


def open_chain(model: Model, **given: Any) -> SamplerChain:
    """The chain that a request with these parameters has, after SEEN."""
    params = SamplingParams(**(OFF | given))
    chain = SamplerChain.build(stages_of(params, REACH), model.vocab)
    chain.accept(np.array(SEEN, np.int32))
    return chain


def count_draws(chain: SamplerChain, logits: np.ndarray) -> np.ndarray:
    candidates = Candidates(logits)
    draws = [candidates.draw(chain) for _ in range(N_DRAWS)]
    return np.bincount(draws, minlength=len(logits))


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(model, name):
    """
    Of the stages that the parameters mean, and not of others.
    """
    case = CASES[name]

    counts = count_draws(open_chain(model, **case.params), LOGITS)

    assert chi_squared_is_low(counts, softmax(after(case.right, LOGITS, SEEN)))
    assert not chi_squared_is_low(counts, softmax(after(case.wrong, LOGITS, SEEN)))


def test_xtc_happens_as_often_as_it_should(model):
    """
    With probability 0.3 the mixture of both distributions is drawn from.
    """
    chain = open_chain(model, xtc_probability=0.3, xtc_threshold=0.05)
    with_it = softmax(expected(Xtc(1.0, 0.05, 0), LOGITS))
    without = softmax(LOGITS.astype(np.float64))

    counts = count_draws(chain, LOGITS)

    assert chi_squared_is_low(counts, 0.3 * with_it + 0.7 * without)
    assert not chi_squared_is_low(counts, 0.4 * with_it + 0.6 * without)


@pytest.mark.parametrize(("version", "tau"), [(1, 1.5), (1, 2.0), (2, 2.0), (2, 2.5)])
def test_mirostat_draws_the_first_token_by_its_definition(model, version, tau):
    """
    A new chain a draw: each draw changes mu, and with it what the next one sees.
    """
    logits, candidates = LOGITS.astype(np.float64), Candidates(LOGITS)
    stage = Mirostat(version, tau, 0.1, 0)
    left = mirostat_first(stage, logits, model.n_vocab)
    off = mirostat_first(Mirostat(version, 2 * tau, 0.1, 0), logits, model.n_vocab)

    draws = []
    for seed in range(N_DRAWS):
        seeded = Mirostat(version, tau, 0.1, seed * 7919)
        with SamplerChain.build([seeded], model.vocab) as chain:
            draws.append(candidates.draw(chain))
    counts = np.bincount(draws, minlength=N)

    assert 1 < np.isfinite(left).sum() < N
    assert chi_squared_is_low(counts, softmax(left))
    assert not chi_squared_is_low(counts, softmax(off))


@pytest.mark.parametrize("boost", [2.0, -20.0])
def test_infill_draws_by_its_definition(model, boost):
    """
    Among tokens that begin alike, with an end that is likely or not.
    """
    vocab, chance = model.vocab, np.random.default_rng(8)
    logits = np.full(model.n_vocab, -np.inf, np.float32)
    ids = [*chance.choice(np.arange(97, 312), 20, replace=False), *vocab.eog_tokens]
    logits[ids] = chance.normal(0, 1.0, len(ids))
    logits[ids[:3]] += 6
    logits[list(vocab.eog_tokens)] = boost + chance.normal(0, 1, len(vocab.eog_tokens))
    params = {"top_k": 22, "stages": ("top_k", "infill")}
    pieces = [vocab.piece(token) for token in range(model.n_vocab)]
    left = infilled(logits.astype(np.float64), pieces, vocab.eog_tokens)

    counts = count_draws(open_chain(model, **params), logits)

    assert 1 < np.isfinite(left).sum() < 22
    assert chi_squared_is_low(counts, softmax(left))
    assert not chi_squared_is_low(counts, softmax(logits.astype(np.float64)))


def test_biases_and_suppressed_tokens_are_in_the_distribution(model):
    """
    Of the whole row, as a step samples it.
    """
    bias, gone = {4: 2.0, 9: -1.5, 30: 4.0}, (2, 11)
    params = SamplingParams(**OFF, logit_bias=bias, suppress_tokens=gone)
    wanted = LOGITS.astype(np.float64)
    wanted[list(bias)] += list(bias.values())
    off = wanted.copy()
    wanted[list(gone)] = -np.inf
    off[[2, 12]] = -np.inf

    sampler = open_sampler(params, model.vocab, [], frozenset(), None)
    draws = [sampler.sample(LOGITS.copy()) for _ in range(N_DRAWS)]
    sampler.close()
    counts = np.bincount(draws, minlength=N)

    assert chi_squared_is_low(counts, softmax(wanted))
    assert not chi_squared_is_low(counts, softmax(off))
