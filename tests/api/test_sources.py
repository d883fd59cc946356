"""Engines whose model reads prompts with an encoder: what they do, and refuse by name."""

from array import array

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.errors import PromptTooLong, PyllamaError
from pyllama_raw.testing import BOS, FakeExecutor, fake_engine, fake_limits
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


def make_executor(**options) -> FakeExecutor:
    return FakeExecutor(fake_limits(n_source=32), **options)


async def refusal(call) -> str:
    """What *call* is refused with."""
    with pytest.raises(PyllamaError) as caught:
        await call
    return f"{type(caught.value).__name__}: {caught.value}"


async def test_a_prompt_is_read_and_its_output_begins_with_a_token_of_the_model():
    """
    Only the prompt counts as such; each output of several has one of its own.
    """
    executor = make_executor()
    async with fake_engine(executor) as engine:
        params = SamplingParams(n=2, max_tokens=3, temperature=0)
        results = await engine.complete_n("abc", params)
        alone = await engine.complete("abc", SamplingParams(max_tokens=3))

    reads, first = executor.plans[0].works, executor.plans[1].works
    assert [work.tokens for work in reads] == [array("i", [BOS, 97, 98, 99])] * 2
    assert [work.tokens for work in first] == [array("i", [BOS])] * 2
    assert [one.usage.prompt_tokens for one in results] == [4, 4]
    assert {one.token_ids for one in results} == {alone.token_ids}


async def test_what_such_a_model_cannot_do_is_refused_by_name():
    """
    The request is refused before the engine hears of it, and the next one works.
    """
    async with fake_engine(make_executor()) as engine:
        scored = SamplingParams(prompt_logprobs=1)
        chat = [{"role": "user", "content": "a"}]
        refusals = [
            await refusal(engine.complete(chat)),
            await refusal(engine.complete("a", scored)),
            await refusal(engine.score("abc")),
            await refusal(engine.embed(["a"])),
            await refusal(engine.embed(["a"], pooling="mean")),
            await refusal(engine.rank("a", ["b"])),
            await refusal(engine.load_adapter("a", "a.gguf")),
        ]
        result = await engine.complete("a", SamplingParams(max_tokens=2))

    reads = "the model reads prompts with an encoder, and predicts none of their tokens"
    vectors = "'t5' has an encoder beside its decoder, and makes no vectors: give an "
    assert refusals == [
        "Unsupported: chat messages: the model reads one text with an encoder and writes "
        "another: give a text prompt",
        f"Unsupported: prompt_logprobs: {reads}",
        f"Unsupported: prompt_logprobs: {reads}",
        f"Unsupported: embed: {vectors}encoder model",
        f"Unsupported: embed: {vectors}encoder model",
        f"Unsupported: rank: {vectors}encoder model",
        "Unsupported: adapters: this engine generates no text, or reads prompts with an "
        "encoder",
    ]
    assert len(result.token_ids) == 2


@pytest.mark.parametrize("prompt", ["x" * 32, [1] * 33, range(10**9), "x" * 10**6])
async def test_a_prompt_that_is_too_long_is_refused_with_the_limit(prompt):
    """
    What does not fit one read is refused, however it is given.
    """
    async with fake_engine(make_executor()) as engine:
        with pytest.raises(PromptTooLong, match="at most 32 are allowed") as caught:
            await engine.complete(prompt)

    assert caught.value.n_source == 32
