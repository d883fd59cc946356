"""Control tokens in the text of an output, where they are asked for."""

from __future__ import annotations

import pytest

from pyllama_raw import FinishReason, SamplingParams
from pyllama_raw.results import StopString, StopToken
from pyllama_raw.testing import BOS, EOS, FakeExecutor, fake_engine, fake_limits

pytestmark = pytest.mark.anyio

WRITTEN = (*b"a", BOS, *b"b", BOS, *b"c", EOS)


def writer(*tokens: int) -> FakeExecutor:
    """An executor that writes *tokens* after a prompt of five."""
    return FakeExecutor(
        fake_limits(), next_token=lambda before: tokens[len(before) - 5]
    )


async def written(params: SamplingParams):
    """Texts of the deltas, and the result."""
    async with fake_engine(writer(*WRITTEN)) as engine:
        async with engine.generate([1] * 5, params) as generation:
            texts = [delta.text async for delta in generation]
    return "".join(texts), generation.result


@pytest.mark.parametrize(("special", "text"), [(False, "abc"), (True, "a<s>b<s>c")])
async def test_control_tokens_have_names_where_asked(special, text):
    """
    Deltas and the result have the names of control tokens, but not of the one that ends it.
    """
    shown, result = await written(SamplingParams(special=special))

    assert (shown, result.text) == (text, text)
    assert result.finish_detail == StopToken(EOS)
    assert result.token_ids == WRITTEN


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_stop_strings_name_control_tokens(logprobs):
    """
    The engine ends the output with them, also where text before the name is a part.
    """
    params = SamplingParams(special=True, stop=["b<s>"], logprobs=logprobs)
    shown, result = await written(params)

    assert (shown, result.text) == ("a<s>", "a<s>")
    assert result.finish_reason is FinishReason.STOP
    assert result.finish_detail == StopString("b<s>")
    assert result.token_ids == WRITTEN[:4]


async def test_names_stop_nothing_where_they_are_not_text():
    """
    Without special=True a stop string meets no name, and what is around a token is joined.
    """
    _, named = await written(SamplingParams(stop=["<s>"]))
    _, joined = await written(SamplingParams(stop=["bc"]))

    assert named.text == "abc"
    assert joined.finish_detail == StopString("bc")
