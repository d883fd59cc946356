"""Lanes: rows whose likeliest tokens are selected in the graph."""

import gc

import numpy as np
import pytest

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.libllama import EXCEPTION
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import (
    FIRST_MAX,
    RowLogprobs,
    RowSampler,
    RowSamplers,
    SamplerChain,
)
from pyllama_raw.native.stages import Draw, Nucleus, Temperature, TopK
from tests.native.support import (
    generate,
    last_logits,
    make_context,
    names_of,
    prefill,
)
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

PROMPT = [5, 9, 7, 60, 61, 80, 9, 7]


@pytest.fixture(scope="module")
def model():
    with Model.load(tiny_model("llama")) as loaded:
        yield loaded


def make_lane(model, k=FIRST_MAX) -> SamplerChain:
    return SamplerChain.build([TopK(k)], model.vocab)


def make_chain(model, k=40, seed=1) -> SamplerChain:
    stages = [TopK(k), Nucleus("top_p", 0.95), Temperature(1.5), Draw(seed)]
    return SamplerChain.build(stages, model.vocab)


def drawing(model, k=40, seed=1, **options) -> RowSampler:
    return RowSampler(make_chain(model, k, seed), n_first=k, **options)


SERVED = {
    "greedy": lambda _: RowSampler(),
    "greedy, forbidden": lambda _: RowSampler(suppress=[60, 61, 80]),
    "top-k": drawing,
    "largest top-k": lambda model: drawing(model, FIRST_MAX),
    "top-k 1": lambda model: drawing(model, 1),
    "forbidden": lambda model: drawing(model, suppress=range(60, 100)),
    "no end yet": lambda model: drawing(model, ending=range(60, 100), n_min=9),
}


@pytest.mark.parametrize("name", SERVED)
def test_tokens_are_those_of_a_context_without_lanes(model, name):
    """
    Greedy or drawn, with or without forbidden tokens, and only the device chooses.
    """
    make = SERVED[name]
    with make_context(model) as plain:
        host = make(model)
        expected = generate(plain, PROMPT, 20, host)
    lanes = [make_lane(model), make_lane(model)]
    with make_context(model, lanes=lanes) as context:
        sampler = make(model)
        found = generate(context, PROMPT, 20, sampler, slot=1)

    assert found == expected
    assert (sampler.n_on_host, sampler.n_on_lane) == (0, 20)
    assert (host.n_on_host, host.n_on_lane) == (20, 0)
    assert names_of(lanes[0]) == ("+top-k", "kept")


def test_steps_begun_ahead_and_dropped_draw_nothing(model):
    """
    The draw belongs to the request: a decode that nobody wanted leaves its seed alone.
    """
    with make_context(model, lanes=[make_lane(model)]) as context:
        expected = generate(context, PROMPT, 12, drawing(model))
        context.clear()
        batch, samplers = Batch(64), RowSamplers(1)
        samplers.set_all([drawing(model)])
        prefill(context, PROMPT[:-1])
        token, found = PROMPT[-1], []
        for n_known in range(len(PROMPT) - 1, len(PROMPT) + 11):
            batch.clear()
            batch.add_rows([token], [n_known], [0])
            (token,) = context.step(batch, samplers, ahead=True).tokens
            found.append(token)
            assert context.drop()
            context.seq_rm(0, n_known + 1, -1)

    assert found == expected


def watched(of_sampler: bool) -> RowSampler:
    sampler = RowSampler()
    sampler.watch(RowLogprobs(2, of_sampler=of_sampler))
    return sampler


def masked(model) -> RowSampler:
    return RowSampler(mask=np.full(-(-model.n_vocab // 32), 2**32 - 1, np.uint32))


NOT_SERVED = {
    "whole chain": lambda model: RowSampler(make_chain(model)),
    "bias": lambda _: RowSampler(bias={5: 1.0}),
    "mask": masked,
    "logprobs of the model": lambda _: watched(of_sampler=False),
    "too many": lambda model: drawing(model, FIRST_MAX, suppress=[1]),
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_sampler_that_needs_the_row_fails_alone(model, name):
    """
    What a lane left is never taken for a row of logits.
    """
    make = NOT_SERVED[name]
    batch, samplers = Batch(64), RowSamplers(2)
    with make_context(model, lanes=[make_lane(model)]) as context:
        for slot in (0, 1):
            batch.add(PROMPT, 0, slot, True)
        samplers.set_all([make(model), make(model)])
        outcome = context.step(batch, samplers)

    assert outcome.codes == [EXCEPTION, 0]
    assert outcome.tokens[0] == -1 < outcome.tokens[1]


def test_logprobs_of_the_sampler_are_those_of_the_host(model):
    """
    They are read from the candidates of the draw, which are the same.
    """
    found = []
    for lanes in ([], [make_lane(model)]):
        wanted = RowLogprobs(5, of_sampler=True)
        sampler = drawing(model)
        sampler.watch(wanted)
        with make_context(model, lanes=lanes) as context:
            (token,) = generate(context, PROMPT, 1, sampler)
        found.append((token, wanted.value, wanted.top))

    assert found[0] == found[1]


def test_rows_of_a_lane_cannot_be_read(model):
    """
    score() refuses what libllama did not copy, of logits there are those of candidates.
    """
    with make_context(model) as context:
        expected = last_logits(context, PROMPT)
    row = np.array([len(PROMPT) - 1], np.int32)
    with make_context(model, lanes=[make_lane(model)]) as context:
        prefill(context, PROMPT)
        assert 0 < len(context.logits(len(PROMPT) - 1)) < model.n_vocab
        with pytest.raises(InvalidRequest, match="rows of the last batch"):
            context.score(row, row, 1)
        context.clear()
        context.set_lanes([])

        assert np.array_equal(last_logits(context, PROMPT), expected)
        assert len(context.score(row, row, 1).logprobs) == 1


def test_lanes_come_and_go(model):
    """
    Tokens are the same after every switch.
    """
    with make_context(model) as context:
        outputs = []
        for index in range(5):
            context.set_lanes([make_lane(model)] if index % 2 else [])
            sampler = drawing(model)
            outputs.append(generate(context, PROMPT, 6, sampler))
            context.clear()
            assert (sampler.n_on_lane > 0) == bool(index % 2)

    assert outputs == [outputs[0]] * 5


def test_a_chain_is_a_lane_once(model):
    """
    libllama would end the process on the second time, and skip its stages on the host.
    """
    lane = make_lane(model)
    with make_context(model, lanes=[lane]) as context:
        with pytest.raises(InvalidRequest, match="never were one"):
            context.set_lanes([lane])
        with pytest.raises(InvalidRequest, match="never were one"):
            RowSampler(lane)
        twice = make_lane(model)
        with pytest.raises(InvalidRequest, match="never were one"):
            context.set_lanes([twice, twice])
        with pytest.raises(InvalidRequest, match="at most 4"):
            context.set_lanes([make_lane(model) for _ in range(5)])

        assert generate(context, PROMPT, 3, RowSampler())


def test_lanes_outlive_their_context(model):
    """
    They may be closed or dropped at once; they are freed after the context.
    """
    lane = make_lane(model)
    context = make_context(model, lanes=[lane])
    context.set_lanes([make_lane(model)])
    lane.close()
    del lane
    gc.collect()

    assert len(generate(context, PROMPT, 3, RowSampler())) == 3
    context.close()


@pytest.mark.parametrize("k", [1, 2, 40, FIRST_MAX])
@pytest.mark.parametrize("n_vocab", [5, 1000, 5000])
def test_the_first_of_a_row_are_what_top_k_leaves(model, k, n_vocab):
    """
    A leading top-k reads a row once; the draws are those of the stage alone, also with
    tokens that are impossible.
    """
    chance = np.random.default_rng(k)
    fast, plain = drawing(model, k), RowSampler(make_chain(model, k))
    for _ in range(50):
        logits = chance.normal(0, 3, n_vocab).astype(np.float32)
        logits[chance.integers(0, n_vocab, n_vocab // 3)] = -np.inf
        logits[0], logits[1] = 3.0, np.nan

        assert fast.sample(logits.copy()) == plain.sample(logits.copy())


def test_of_equal_logits_the_lowest_ids_are_first(model):
    """
    A top-k of 1 among equals is the first of them, as for greedy rows.
    """
    logits = np.zeros(3000, np.float32)
    logits[[2900, 1700, 77]] = 2.0

    assert drawing(model, 1).sample(logits.copy()) == 77
    assert drawing(model, 1).sample(np.zeros(3000, np.float32)) == 0


def test_the_size_of_the_first_has_a_limit(model):
    """
    More than FIRST_MAX would be read beyond what is selected.
    """
    with pytest.raises(InvalidRequest, match="n_first"):
        RowSampler(make_chain(model), n_first=FIRST_MAX + 1)
