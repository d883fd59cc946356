"""
Each stage against numpy: the same candidates with the same probabilities. Draws from them
are in test_draws.py.

The logits are random numbers of a vocabulary of 48: no model is computed, and the model
only lends its vocabulary where a stage asks for one.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from pyllama_raw.native.sampler import SamplerChain
from pyllama_raw.native.stages import (
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
from tests.native.stage_reference import Candidates, expected

pytestmark = pytest.mark.native

N = 48


def make_logits(seed: int = 0, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, n).astype(np.float32)


def build(model, *stages: Stage, seen: Sequence[int] = ()) -> SamplerChain:
    chain = SamplerChain.build(stages, model.vocab)
    chain.accept(np.array(seen, np.int32))
    return chain


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
