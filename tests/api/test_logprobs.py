"""Log-probabilities as callers see them, with a fake executor below a real scheduler."""

import math

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.api.results import Score, TokenLogprobs
from pyllama_raw.errors import InvalidRequest
from pyllama_raw.testing import (
    BOS,
    EOS,
    FakeExecutor,
    FakeVocab,
    fake_engine,
    fake_limits,
    fake_logprobs,
)

pytestmark = pytest.mark.anyio


def said(n_before: int, token: int, n_top: int) -> TokenLogprobs:
    """The entry of the fake executor, with the bytes of its tokens."""
    entry = fake_logprobs(n_before, token, n_top)
    pieces = [FakeVocab().piece(t, special=True) for t, _ in entry.top]
    own = FakeVocab().piece(token, special=True)
    return entry._replace(piece=own, top_pieces=tuple(pieces))


async def test_each_output_token_has_its_own():
    """
    Deltas and the result carry one item a token, in order; top is as long as asked for.
    """
    async with fake_engine() as engine:
        params = SamplingParams(max_tokens=6, logprobs=2)
        async with engine.generate("hello", params) as generation:
            deltas = [delta async for delta in generation]
        result = generation.result

    n_prompt = result.usage.prompt_tokens
    expected = [said(n_prompt + i, t, 2) for i, t in enumerate(result.token_ids)]
    assert list(result.logprobs) == expected
    assert [item for delta in deltas for item in delta.logprobs] == expected
    assert isinstance(result.logprobs[0], TokenLogprobs)
    assert result.prompt_logprobs == ()


async def test_who_does_not_ask_gets_none():
    """
    Beside a request that asks, one that does not has none.
    """
    async with fake_engine() as engine:
        results = [
            await engine.complete("hello", SamplingParams(max_tokens=3, logprobs=0)),
            await engine.complete("hello", SamplingParams(max_tokens=3)),
        ]

    assert [len(result.logprobs) for result in results] == [3, 0]
    assert results[0].logprobs[0].top == ()


async def test_control_tokens_have_their_names():
    """
    The piece of a token that ends the output is empty; its log-probability names it.
    """
    executor = FakeExecutor(fake_limits(), next_token=lambda tokens: EOS)
    async with fake_engine(executor) as engine:
        result = await engine.complete("a", SamplingParams(max_tokens=3, logprobs=1))

    (entry,) = result.logprobs
    assert (result.text, entry.token_id, entry.piece) == ("", EOS, b"</s>")
    assert len(entry.top_pieces) == 1


async def test_prompt_log_probabilities_are_with_the_first_output():
    """
    All prompt tokens but the first are scored, once for all n outputs.
    """
    executor = FakeExecutor(fake_limits(n_outputs=6))
    async with fake_engine(executor) as engine:
        params = SamplingParams(max_tokens=2, n=3, prompt_logprobs=1)
        first, *others = await engine.complete_n("hello world", params)

    prompt = [BOS, *b"hello world"]
    expected = [said(i, token, 1) for i, token in enumerate(prompt) if i]
    assert list(first.prompt_logprobs) == expected
    assert [result.prompt_logprobs for result in others] == [(), ()]


async def test_score_of_a_text():
    """
    A score names the tokens, and its perplexity is exp of the mean of -logprob.
    """
    async with fake_engine() as engine:
        score = await engine.score("hello", n_top=1)

    assert score.token_ids == (BOS, *b"hello")
    assert score.logprobs == tuple(
        said(i, token, 1) for i, token in enumerate(score.token_ids) if i
    )
    assert score.total == sum(item.logprob for item in score.logprobs)
    assert score.perplexity == pytest.approx(math.exp((1 + 2 + 3 + 4 + 5) / 8 / 5))


async def test_a_single_token_cannot_be_scored():
    """
    There is nothing before the first token: a prompt of one is refused.
    """
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="two tokens"):
            await engine.score([5])


def test_certain_text_has_perplexity_one():
    """
    Probabilities of one give a total of 0 and the least perplexity there is.
    """
    score = Score((1, 2, 3), (TokenLogprobs(2, 0.0, ()), TokenLogprobs(3, 0.0, ())))

    assert (score.total, score.perplexity) == (0.0, 1.0)
