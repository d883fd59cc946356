"""Chains, greedy rows and forbidden tokens."""

from itertools import pairwise

import numpy as np
import pytest

from pyllama_raw.errors import ClosedError, InvalidRequest
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.libllama import last_error
from pyllama_raw.native.sampler import RowSampler, RowSamplers, SamplerChain
from pyllama_raw.native.stages import Draw, Nucleus, Stage, Temperature, TopK
from tests.native.support import (
    generate,
    last_logits,
    make_context,
    make_prompt,
    names_of,
)

pytestmark = pytest.mark.native


def build(model, *stages: Stage) -> SamplerChain:
    return SamplerChain.build(stages, model.vocab)


def narrow(model) -> SamplerChain:
    """Leaves one candidate."""
    return build(model, Nucleus("min_p", 1.0), Draw(0))


def test_a_chain_has_its_stages_in_order(model):
    """
    What is given is built, in that order, and nothing else.
    """
    chain = build(model, TopK(40), Nucleus("top_p", 0.9), Temperature(0.8), Draw(1))

    assert names_of(chain) == ("top-k", "top-p", "temp-ext", "dist")
    assert names_of(build(model, Draw(1))) == ("dist",)


def test_a_narrow_chain_gives_the_argmax(model):
    """
    A chain whose min_p leaves one candidate agrees with the greedy path for many tokens.
    """
    prompt = make_prompt(16, seed=3)
    with make_context(model) as context:
        greedy = generate(context, prompt, 12, RowSampler())
        context.clear()
        chain = generate(context, prompt, 12, RowSampler(narrow(model)))

    assert chain == greedy


def test_equal_seeds_draw_equal_tokens(model):
    """
    The seed decides the draw; a chain draws on; another seed goes elsewhere.
    """
    prompt = make_prompt(16, seed=4)
    outputs = []
    with make_context(model) as context:
        hot = Temperature(1.5)
        chain = build(model, hot, Draw(7))
        others = build(model, hot, Draw(7)), build(model, hot, Draw(8))
        for sampler in (chain, others[0], chain, others[1]):
            outputs.append(generate(context, prompt, 10, RowSampler(sampler)))
            context.clear()

    assert outputs[0] == outputs[1]
    assert outputs[0] not in outputs[2:]


def test_suppressed_tokens_never_come(model):
    """
    Greedy and drawn rows skip forbidden ids and take the best of the rest.
    """
    prompt = make_prompt(10, seed=5)
    with make_context(model) as context:
        logits = last_logits(context, prompt)
        best = np.argsort(-logits, kind="stable")[:4].tolist()
        for suppress, expected in ((best[:1], best[1]), (best[:3], best[3])):
            for chain in (None, narrow(model)):
                context.clear()
                sampler = RowSampler(chain, suppress)
                assert generate(context, prompt, 1, sampler) == [expected]


def test_no_token_left_fails_the_row(model):
    """
    With the whole vocabulary suppressed a row has a code, and nothing aborts.
    """
    prompt = make_prompt(4)
    everything = range(model.n_vocab)
    with make_context(model) as context:
        with pytest.raises(AssertionError):
            generate(context, prompt, 1, RowSampler(None, everything))


def test_rows_are_the_same_in_several_threads(model):
    """
    Threads change no token, and a row that fails in one of them fails alone, and says why.
    """
    outcomes = []
    for n_threads in (1, 3):
        with make_context(model, n_threads=n_threads, n_seq_max=6) as context:
            batch, samplers = Batch(64), RowSamplers(6)
            for slot in range(6):
                batch.add(make_prompt(8, seed=slot), 0, slot, True)
            chains = [build(model, Temperature(1.5), Draw(slot)) for slot in range(6)]
            rows = [RowSampler(chain) for chain in chains]
            rows[4] = RowSampler(build(model, Draw(1)), range(model.n_vocab))
            samplers.set_all(rows)

            outcome = context.step(batch, samplers)

            outcomes.append((outcome.tokens, [code == 0 for code in outcome.codes]))
            assert last_error() == "no token is allowed here"

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == [True, True, True, True, False, True]


def test_equal_logits_take_the_lowest_id(model):
    """
    Greedy means the first of the largest, as numpy's argmax has it.
    """
    with make_context(model) as context:
        for seed in range(5):
            context.clear()
            token = generate(context, make_prompt(3, seed), 1, RowSampler())
            assert token == [int(np.asarray(context.logits(2)).argmax())]


def test_a_table_of_rows_keeps_its_samplers():
    """
    RowSamplers refuses rows beyond its capacity, and holds what C points to.
    """
    table = RowSamplers(2)
    table.set_all([RowSampler(), RowSampler()])

    with pytest.raises(InvalidRequest, match="rows=3"):
        table.set_all([RowSampler() for _ in range(3)])
    with pytest.raises(InvalidRequest, match="rows=3"):
        table.set_all([RowSampler()] * 3)
    addresses = [sampler.address for sampler in table._samplers]
    assert addresses == table._table.tolist()
    assert all(a != b for a, b in pairwise(addresses))


def test_suppressed_ids_must_be_token_ids():
    """
    Negative ids would be another token to C.
    """
    with pytest.raises(InvalidRequest, match="suppress=-1"):
        RowSampler(None, [-1])


def test_closing_a_row_sampler_closes_its_chain(model):
    """
    A request's chain is freed with its row sampler.
    """
    chain = build(model, Draw(0))
    sampler = RowSampler(chain)
    sampler.close()
    sampler.close()

    with pytest.raises(ClosedError):
        _ = chain.ptr
