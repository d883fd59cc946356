"""Log-probabilities against numpy's log-softmax of the same rows."""

import numpy as np
import pytest

from pyllama_raw.errors import ConfigError, InvalidBatch, InvalidRequest
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.sampler import MAX_TOP, RowLogprobs, RowSampler, SamplerChain
from pyllama_raw.native.stages import Draw, Temperature, TopK
from tests.native.support import make_context, make_prompt

pytestmark = pytest.mark.native

N_VOCAB = 5000


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def make_logits(seed: int, n_vocab: int = N_VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 5, n_vocab).astype(np.float32)


def best(expected: np.ndarray, n_top: int) -> list[int]:
    return np.argsort(-expected, kind="stable")[:n_top].tolist()


@pytest.mark.parametrize("n_top", [0, 1, 5, 20, MAX_TOP])
def test_of_a_row_as_the_model_made_it(model, n_top):
    """
    Token and top are numpy's log-softmax of the row before any bias or suppression.
    """
    chain = SamplerChain.build([TopK(40), Temperature(0.5), Draw(3)], model.vocab)
    sampler = RowSampler(chain, [7], bias={9: 50.0})
    sampler.watch(row := RowLogprobs(n_top))
    for seed in range(20):
        logits = make_logits(seed)
        logits[7] = logits.max() + 1
        expected = log_softmax(logits)

        token = sampler.sample(logits)

        ids = [i for i, _ in row.top]
        assert row.value == pytest.approx(expected[token], abs=1e-5)
        assert ids == best(expected, n_top)
        assert [v for _, v in row.top] == pytest.approx(expected[ids], abs=1e-5)
        assert token == 9


def test_of_what_the_draw_was_from(model):
    """
    With of_sampler they are those of the candidates that were left, at their temperature.
    """
    chain = SamplerChain.build([TopK(4), Temperature(2.0), Draw(3)], model.vocab)
    sampler = RowSampler(chain)
    sampler.watch(row := RowLogprobs(10, of_sampler=True))
    for seed in range(20):
        logits = make_logits(seed)
        left = best(logits, 4)
        expected = dict(zip(left, log_softmax(logits[left] / 2), strict=True))

        token = sampler.sample(logits)

        assert row.value == pytest.approx(expected[token], abs=1e-5)
        assert [i for i, _ in row.top] == left
        assert [v for _, v in row.top] == pytest.approx(
            list(expected.values()), abs=1e-5
        )


def test_a_greedy_draw_is_certain():
    """
    Without a chain nothing is drawn: the token has probability 1 and is alone.
    """
    sampler = RowSampler()
    sampler.watch(row := RowLogprobs(3, of_sampler=True))

    token = sampler.sample(make_logits(0))

    assert (row.value, row.top) == (0.0, ((token, 0.0),))


def test_equals_go_by_id_and_impossible_tokens_are_left_out():
    """
    Of equal logits the lowest id comes first; -infinity and NaN are in no top.
    """
    logits = np.full(8, -np.inf, np.float32)
    logits[[6, 2, 4]] = 1.0
    logits[5] = np.nan
    sampler = RowSampler()
    sampler.watch(row := RowLogprobs(5))

    sampler.sample(logits)

    assert [i for i, _ in row.top] == [2, 4, 6]
    assert [v for _, v in row.top] == pytest.approx([-np.log(3)] * 3)


def test_a_sampler_can_stop_being_watched():
    """
    watch(None) leaves the last values alone.
    """
    sampler = RowSampler()
    sampler.watch(row := RowLogprobs(1))
    sampler.sample(make_logits(1))
    before = row.value, row.top
    sampler.watch(None)

    sampler.sample(make_logits(2))

    assert (row.value, row.top) == before


def test_score_is_that_of_the_rows(model):
    """
    Rows of a batch are scored as numpy does it, for any tokens.
    """
    tokens = make_prompt(24)
    with make_context(model, n_outputs_max=24) as context:
        batch = Batch(context.n_batch)
        batch.add_scored(tokens, 0, 0)
        context.decode(batch)
        expected = log_softmax(
            np.array([np.asarray(context.logits(i)) for i in range(24)])
        )
        rows, targets = np.arange(23, dtype=np.int32), np.array(tokens[1:], np.int32)
        found = context.score(rows, targets, 5)

    np.testing.assert_allclose(found.logprobs, expected[rows, targets], atol=1e-5)
    ids = np.array(found.ids).reshape(23, 5)
    assert ids.tolist() == [best(expected[i], 5) for i in rows]
    top = np.take_along_axis(expected[:23], ids, 1)
    np.testing.assert_allclose(found.values, top.ravel(), atol=1e-5)


def test_what_has_no_row_is_refused(model):
    """
    Rows that were not computed, more rows than there are, and a top too long raise.
    """
    tokens = make_prompt(8)
    with make_context(model, n_outputs_max=6) as context:
        batch = Batch(context.n_batch)
        batch.add_scored(tokens, 0, 0)
        with pytest.raises(InvalidBatch, match="at most 6"):
            context.decode(batch)
        batch.clear()
        batch.add(tokens, 0, 0, output=True)
        context.decode(batch)
        one = np.array([3], np.int32)
        for rows, n_top in ((one, 1), (one * 99, 1), (one - 9, 1), (one, MAX_TOP + 1)):
            with pytest.raises(InvalidRequest):
                context.score(rows, one, n_top)


@pytest.mark.parametrize(
    ("asked", "got"), [(None, 4), (1, 4), (4, 4), (100, 100), (10**6, 256)]
)
def test_output_rows_are_at_least_one_a_sequence(model, asked, got):
    """
    libllama would abort with fewer rows than sequences; more than n_batch are no use.
    """
    with make_context(model, n_outputs_max=asked) as context:
        assert context.n_outputs_max == got


def test_no_output_rows_are_no_option(model):
    """
    Negative numbers of rows are refused before libllama sees them.
    """
    with pytest.raises(ConfigError, match="n_outputs_max"):
        make_context(model, n_outputs_max=-1)
