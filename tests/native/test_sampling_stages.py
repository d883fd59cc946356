"""
Each stage against numpy: the same candidates with the same probabilities, and draws that
follow them.

The logits are random numbers of a vocabulary of 48: no model is computed, and the model
only lends its vocabulary where a stage asks for one.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.sampler import SamplerChain
from pyllama_raw.native.stages import (
    AdaptiveP,
    Draw,
    Dry,
    Greedy,
    Infill,
    Mirostat,
    Nucleus,
    Penalties,
    Stage,
    Temperature,
    TopK,
    TopNSigma,
    Xtc,
)

pytestmark = pytest.mark.native

N = 48
N_DRAWS = 20_000
CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


def make_logits(seed: int = 0, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, n).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


class Candidates:
    """A llama_token_data_array that can be filled again and again."""

    def __init__(self, logits: np.ndarray) -> None:
        self._fresh = np.zeros(len(logits), CANDIDATE)
        self._fresh["id"] = np.arange(len(logits))
        self._fresh["logit"] = logits
        self._data = self._fresh.copy()
        self._view = ffi.new("llama_token_data_array *")

    def apply(self, chain: SamplerChain):
        self._data[:] = self._fresh
        self._view.data = ffi.cast("llama_token_data *", self._data.ctypes.data)
        self._view.size = len(self._fresh)
        self._view.selected, self._view.sorted = -1, False
        lib.llama_sampler_apply(chain.ptr, self._view)
        return self._view

    def draw(self, chain: SamplerChain) -> int:
        view = self.apply(chain)
        return int(view.data[view.selected].id)

    def left(self, chain: SamplerChain) -> np.ndarray:
        """Logits of what is left by id; -infinity is gone."""
        view = self.apply(chain)
        found = np.full(len(self._fresh), -np.inf)
        for i in range(view.size):
            found[view.data[i].id] = view.data[i].logit
        return found


def build(model, *stages: Stage, seen: Sequence[int] = ()) -> SamplerChain:
    chain = SamplerChain.build(stages, model.vocab)
    chain.accept(np.array(seen, np.int32))
    return chain


def expected(stage: Stage, logits: np.ndarray, seen: Sequence[int] = ()) -> np.ndarray:
    """The logits that *stage* leaves, written down from its definition."""
    logits = logits.astype(np.float64)
    match stage:
        case Penalties():
            return penalized(stage, logits, seen)
        case Dry():
            return dried(stage, logits, seen)
        case Temperature() | AdaptiveP():
            return scaled(stage, logits)
        case Nucleus():
            return kept(stage, logits)
    return np.where(survives(stage, logits), logits, -np.inf)


def survives(stage: Stage, logits) -> np.ndarray:
    match stage:
        case TopNSigma(n):
            return logits >= logits.max() - n * logits.std()
        case TopK(k):
            return logits >= np.sort(logits)[-min(k, N)]
        case Xtc(_, threshold):
            above = softmax(logits) >= threshold
            least = logits[above].min() if above.sum() > 1 else np.inf
            return ~above | (logits <= least)
    raise AssertionError(stage)


def scaled(stage: Temperature | AdaptiveP, logits) -> np.ndarray:
    p = softmax(logits)
    if isinstance(stage, AdaptiveP):
        distance = abs(p - stage.target) / 0.3
        return 5 - 10 * distance**2 / (1 + distance)
    if stage.spread == 0:
        return logits / stage.value
    entropy = -(p * np.log(p)).sum() / np.log(len(logits))
    low, high = max(stage.value - stage.spread, 0), stage.value + stage.spread
    return logits / (low + (high - low) * entropy**stage.exponent)


def penalized(stage: Penalties, logits, seen):
    found = logits.copy()
    recent = list(seen)[-stage.last_n :]
    for token in set(recent):
        x = found[token]
        x = x * stage.repeat if x <= 0 else x / stage.repeat
        found[token] = x - recent.count(token) * stage.frequency - stage.presence
    return found


def dried(stage: Dry, logits, seen):
    found, recent = logits.copy(), list(seen)[-stage.last_n :]
    longest: dict[int, int] = {}
    for i in range(1, len(recent)):
        length = 0
        while length < i and recent[i - 1 - length] == recent[-1 - length]:
            length += 1
        longest[recent[i]] = max(longest.get(recent[i], 0), length)
    for token, length in longest.items():
        over = length - stage.allowed_length
        if over >= 0:
            found[token] -= stage.multiplier * stage.base**over
    return found


def kept(stage: Nucleus, logits):
    p = softmax(logits)
    if stage.kind == "min_p":
        keep = p >= stage.p * p.max()
        keep |= np.isin(np.arange(len(p)), np.argsort(-p)[: stage.min_keep])
        return np.where(keep, logits, -np.inf)
    entropy = -(p * np.log(p)).sum()
    key = -p if stage.kind == "top_p" else abs(-np.log(p) - entropy)
    order = np.argsort(key, kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(p[order]), stage.p)) + 1
    keep = order[: max(n_kept, stage.min_keep)]
    return np.where(np.isin(np.arange(len(p)), keep), logits, -np.inf)


SEEN = [3, 7, 3, 9, 1, 2, 3, 7, 5, 9, 1, 2, 3]
STAGES = [
    Penalties(64, repeat=1.3),
    Penalties(64, frequency=0.4),
    Penalties(64, presence=0.7),
    Penalties(4, repeat=1.1, frequency=-0.3, presence=0.5),
    Dry(64, 0.8),
    Dry(64, 0.5, base=1.2, allowed_length=1),
    Dry(6, 2.0, allowed_length=0),
    TopNSigma(1.0),
    TopNSigma(0.3),
    TopK(1),
    TopK(7),
    TopK(2**31 - 1),
    Nucleus("typical", 0.3),
    Nucleus("typical", 0.8, 30),
    Nucleus("top_p", 0.5),
    Nucleus("top_p", 0.9, 25),
    Nucleus("min_p", 0.1),
    Nucleus("min_p", 0.9, 6),
    Xtc(1.0, 0.05, 1),
    Xtc(1.0, 0.2, 1),
    Temperature(0.3),
    Temperature(2.0),
    Temperature(0.8, 0.5, 1.0),
    Temperature(1.0, 2.0, 0.5),
]


@pytest.mark.parametrize("stage", STAGES, ids=repr)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_stage_leaves_what_its_definition_says(model, stage, seed):
    """
    The candidates are the same, and their logits to six digits.
    """
    logits = make_logits(seed)
    wanted = expected(stage, logits, SEEN)

    found = Candidates(logits).left(build(model, stage, seen=SEEN))

    assert np.array_equal(np.isfinite(found), np.isfinite(wanted))
    assert np.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def chi_squared_is_low(counts: np.ndarray, p: np.ndarray) -> bool:
    """Whether *counts* look like draws from *p*; rare candidates are taken together."""
    assert counts[p == 0].sum() == 0
    wanted = p * counts.sum()
    often = wanted >= 8
    wanted = np.append(wanted[often], wanted[~often].sum())
    counts = np.append(counts[often], counts[~often].sum())
    seen = wanted > 0
    statistic = ((counts[seen] - wanted[seen]) ** 2 / wanted[seen]).sum()
    freedom = max(int(seen.sum()) - 1, 1)
    return bool(statistic < freedom + 4 * np.sqrt(2 * freedom) + 4)


def test_the_chi_squared_test_can_fail():
    """
    Draws from a slightly different distribution are told apart.
    """
    p, other = softmax(make_logits(1)), softmax(0.93 * make_logits(1))
    draws = np.random.default_rng(0).choice(N, N_DRAWS, p=other)

    assert not chi_squared_is_low(np.bincount(draws, minlength=N), p)


CHANCE = [s for s in STAGES if not isinstance(s, TopK | Dry)][::2]


@pytest.mark.parametrize("stage", [*CHANCE, AdaptiveP(0.2, 0.9, 7)], ids=repr)
def test_draws_follow_the_distribution(model, stage):
    """
    20,000 draws after a stage agree with the softmax of what it should leave.
    """
    logits = make_logits(3)
    last = () if isinstance(stage, AdaptiveP) else (Draw(11),)
    chain = build(model, stage, *last, seen=SEEN)
    candidates = Candidates(logits)
    wanted = softmax(expected(stage, logits, SEEN))

    draws = [candidates.draw(chain) for _ in range(N_DRAWS)]

    assert chi_squared_is_low(np.bincount(draws, minlength=N), wanted)


def test_xtc_happens_as_often_as_it_should(model):
    """
    With probability 0.3 the mixture of both distributions is drawn from.
    """
    logits = make_logits(3)
    stage = Xtc(0.3, 0.05, 5)
    chain, candidates = build(model, stage, Draw(6)), Candidates(logits)
    with_it = softmax(expected(stage, logits))
    wanted = 0.3 * with_it + 0.7 * softmax(logits.astype(np.float64))

    draws = [candidates.draw(chain) for _ in range(N_DRAWS)]

    assert chi_squared_is_low(np.bincount(draws, minlength=N), wanted)


def mirostat_first(logits: np.ndarray, tau: float) -> np.ndarray:
    """The distribution of the first draw of version 2: mu is 2 tau."""
    p = softmax(logits)
    return softmax(np.where(-np.log2(p) <= 2 * tau, logits, -np.inf))


@pytest.mark.parametrize("tau", [0.8, 1.5])
def test_mirostat_draws_the_first_token_by_its_definition(model, tau):
    """
    A new chain a draw, as each draw changes what the next one sees.
    """
    logits, candidates = make_logits(3), Candidates(make_logits(3))
    wanted = mirostat_first(logits.astype(np.float64), tau)

    draws = []
    for seed in range(N_DRAWS // 4):
        with build(model, Mirostat(2, tau, 0.1, seed * 7919)) as chain:
            draws.append(candidates.draw(chain))

    assert chi_squared_is_low(np.bincount(draws, minlength=N), wanted)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise(model, version):
    """
    A larger tau leaves more candidates to draw from, over many draws.
    """
    logits = make_logits(3)
    candidates = Candidates(logits)

    def mean_kept(tau: float) -> float:
        chain = build(model, Mirostat(version, tau, 0.1, 3))
        sizes = [candidates.apply(chain).size for _ in range(400)]
        return float(np.mean(sizes[100:]))

    assert mean_kept(0.5) < mean_kept(2.0)


def test_infill_ends_where_the_end_is_likely(model):
    """
    With an end-of-generation token among few candidates, only such tokens are left.
    """
    logits = np.full(model.n_vocab, -20, np.float32)
    logits[model.vocab.eos] = 5
    chain = build(model, TopK(5), Infill(5), Draw(0))

    assert Candidates(logits).draw(chain) in model.vocab.eog_tokens


def test_a_repetition_does_not_reach_across_a_breaker(model):
    """
    The same history is penalized without the breaker and not with it.
    """
    vocab = model.vocab
    words = vocab.tokenize(
        " one two\n three four one two\n three", add_special=False, parse_special=False
    )
    logits = np.zeros(model.n_vocab, np.float32)

    def lowered(breakers: tuple[str, ...]) -> int:
        stage = Dry(64, 1.0, allowed_length=2, breakers=breakers)
        chain = build(model, stage, seen=words)
        return int((Candidates(logits).left(chain) < 0).sum())

    assert lowered(()) > 0
    assert lowered(("\n",)) == 0


def test_greedy_ends_a_chain(model):
    """
    The most likely of what the penalties left.
    """
    logits = make_logits(4)
    best, second = np.argsort(-logits)[:2]
    chain = build(model, Penalties(8, presence=50), Greedy(), seen=[int(best)])

    assert Candidates(logits).draw(chain) == second
