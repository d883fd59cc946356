"""Our top-p leaves what libllama's does, to the last bit."""

from dataclasses import dataclass

import numpy as np
import pytest

from pyllama_raw.native.libllama import lib
from pyllama_raw.native.sampler import SamplerChain
from pyllama_raw.native.stages import Nucleus, TopK
from tests.native.stage_reference import Candidates
from tests.support.products import in_turn

pytestmark = pytest.mark.native

N = 3000  # libllama sorts more than 1,024 in parts


@dataclass
class Libllama:
    """Its own top-p, as a stage."""

    p: float
    min_keep: int

    def make(self, vocab):
        return lib.llama_sampler_init_top_p(self.p, self.min_keep)


def left(model, candidates, *stages):
    """Ids, logits and probabilities of what is left, best first."""
    chain = SamplerChain.build(stages, model.vocab)
    view = candidates.apply(chain)
    assert view.sorted
    found = [(one.id, one.logit, one.p) for one in view.data[0 : view.size]]
    chain.close()
    return found


@pytest.mark.parametrize(
    ("width", "p", "min_keep", "before"),
    in_turn(
        (0.01, 1.0, 4.0, 30.0),
        (0.0, 1e-3, 0.5, 0.9, 0.95, 0.999, 0.9999999),
        (0, 1, 700),
        ((), (TopK(50),)),
        always=lambda _, p, min_keep, before: (min_keep, before) == (0, ()),
    ),
)
def test_it_leaves_what_the_one_of_libllama_does(model, width, p, min_keep, before):
    """
    Of flat and peaked rows, sorted or not: ids, logits and probabilities. No two
    logits are equal: their order is not promised.
    """
    for seed in range(3):
        rng = np.random.default_rng(seed)
        logits = rng.permutation(np.unique(rng.normal(5, width, N).astype(np.float32)))
        candidates = Candidates(logits)
        mine = left(model, candidates, *before, Nucleus("top_p", p, min_keep))
        theirs = left(model, candidates, *before, Libllama(p, min_keep))
        assert mine == theirs


def test_of_equals_the_lowest_id_comes_first(model):
    """
    libllama promises no order.
    """
    candidates = Candidates(np.zeros(N, np.float32))
    found = left(model, candidates, Nucleus("top_p", 0.1))
    assert [token for token, *_ in found] == list(range(len(found)))
    assert len(found) == pytest.approx(N / 10, abs=1)


def test_a_copy_does_the_same(model):
    """
    libllama copies whole chains.
    """
    chain = SamplerChain.build([Nucleus("top_p", 0.5, 3)], model.vocab)
    copy = SamplerChain(lib.plr_sampler_clone(chain.ptr), lib.llama_sampler_free)
    candidates = Candidates(np.random.default_rng(0).normal(0, 2, N).astype(np.float32))
    expected = candidates.left(chain)
    chain.close()

    assert np.array_equal(candidates.left(copy), expected)
    copy.close()
