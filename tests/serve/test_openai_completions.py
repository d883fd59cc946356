"""
Completions in OpenAI's words.

The client's own types forbid what OpenAI sends: `finish_reason` null before the last chunk, and
null for the first token of a prompt. So its check of types is off for these.
"""

from dataclasses import replace

import openai
import pytest

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.results import SpecialToken
from pyllama_raw.testing import fake_engine, fake_parts
from tests.serve.clients import completion_chunks, joined_completion, talking

pytestmark = pytest.mark.anyio

PROMPT = "ab\u00e9c"
IDS = [256, *PROMPT.encode()]
FORMS = {
    "plain": {},
    "n": {"n": 2, "best_of": 2},
    "prompts": {"prompt": ["a", "bc"], "n": 2},
    "ids": {"prompt": [IDS, [1, 2]]},
    "logprobs": {"logprobs": 2, "n": 2},
    "echo": {"echo": True, "n": 2},
    "echo of ids": {"echo": True, "prompt": IDS},
    "scores": {"echo": True, "logprobs": 1, "prompt": [PROMPT, "x"], "n": 2},
    "only scores": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "only echo": {"echo": True, "max_tokens": 0},
    "stop": {"stop": [*"abcdefghijklmnopqrstuvwxyz"]},
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_stream_of_a_completion_is_the_whole_answer(form):
    """
    Text, reasons and log-probabilities of each choice; the counts are the same, too.
    """
    asked = {"prompt": PROMPT, "max_tokens": 7, "seed": 1} | FORMS[form]
    usage = {"include_usage": True}
    async with fake_engine() as engine, talking(engine, strict=False) as client:
        whole = await client.completions.create(model="a", **asked)
        chunks = await completion_chunks(client, **asked, stream_options=usage)

    n_prompts = len(asked["prompt"]) if isinstance(asked["prompt"], list) else 1
    n_prompts = 1 if form == "echo of ids" else n_prompts
    assert joined_completion(chunks) == joined_completion([whole])
    assert len(whole.choices) == n_prompts * asked.get("n", 1)
    assert [c.index for c in whole.choices] == list(range(len(whole.choices)))
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_an_answer_at_once_has_the_types_of_the_client():
    """
    Also with log-probabilities.
    """
    async with fake_engine() as engine, talking(engine) as client:
        answer = await client.completions.create(
            model="a", prompt=PROMPT, max_tokens=2, logprobs=3
        )

    [choice] = answer.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [0, 1]
    assert [len(top) for top in choice.logprobs.top_logprobs] == [3, 3]


async def test_log_probabilities_may_be_said_to_be_none():
    """
    False is what chats say, and null in the answer.
    """
    async with fake_engine() as engine, talking(engine) as client:
        answer = await client.completions.create(
            model="a", prompt=PROMPT, max_tokens=2, logprobs=False
        )

    assert answer.choices[0].logprobs is None


async def test_text_and_its_ids_are_one_prompt():
    """
    Alone or in a list.
    """
    async with fake_engine() as engine, talking(engine) as client:
        answers = [
            await client.completions.create(model="a", prompt=prompt, max_tokens=5)
            for prompt in (PROMPT, [PROMPT], IDS, [IDS])
        ]

    assert len({answer.choices[0].text for answer in answers}) == 1
    assert {answer.usage.prompt_tokens for answer in answers} == {len(IDS)}


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_scores_of_a_prompt_are_those_of_the_engine(max_tokens):
    """
    As a benchmark asks for them: each token of the prompt but the first has its logprob, and
    the output comes behind.
    """
    async with fake_engine() as engine, talking(engine, strict=False) as client:
        score = await engine.score(IDS)
        answer = await client.completions.create(
            model="a",
            prompt=IDS,
            max_tokens=max_tokens,
            logprobs=1,
            echo=True,
            temperature=0,
        )

    [choice] = answer.choices
    listed = choice.logprobs
    scores = [None, *(entry.logprob for entry in score.logprobs)]
    assert listed.token_logprobs[: len(IDS)] == scores
    assert len(listed.tokens) == len(IDS) + max_tokens == len(listed.top_logprobs)
    assert listed.tokens[:6] == ["<s>", "a", "b", "\\xc3", "\\xa9", "c"]
    assert listed.text_offset[:6] == [0, 0, 1, 2, 2, 3]
    assert choice.text[: len(PROMPT)] == PROMPT
    assert answer.usage.completion_tokens == max_tokens
    assert choice.finish_reason == "length"


async def test_the_token_that_ends_an_output_is_listed():
    """
    A benchmark takes the last entry for the output, whatever it is.
    """
    async with fake_engine() as engine, talking(engine, strict=False) as client:
        answer = await client.completions.create(
            model="a",
            prompt=IDS,
            max_tokens=1,
            logprobs=1,
            echo=True,
            extra_body={"stop_token_ids": list(range(256))},
        )

    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.tokens) == len(IDS) + 1


async def test_a_gap_is_filled_by_models_that_have_tokens_for_it():
    """
    The prompt is the text before, the text behind, and the token that asks for the middle.
    """
    names = ("prefix", "suffix", "middle")
    fill = {name: SpecialToken(token, name) for token, name in enumerate(names, 1)}
    parts = fake_parts()
    info = parts.describe()
    vocab = replace(info.vocab, fill=fill)
    parts = replace(parts, describe=lambda: replace(info, vocab=vocab))
    engine = AsyncEngine(parts)
    async with engine, talking(engine) as client:
        answer = await client.completions.create(
            model="a", prompt="ab", suffix="c", max_tokens=4
        )
        tokens = [256, 1, *b"ab", 2, *b"c", 3]
        params = SamplingParams(max_tokens=4)
        result = await engine.complete(tokens, params)

    assert answer.choices[0].text == result.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1, 258]}, "prompt"),
        ({"prompt": "a" * 200}, "prompt"),
        ({"prompt": "a" * 200, "echo": True}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "b"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"messages": [{"role": "user"}]}}, "messages"),
    ],
)
async def test_a_mistake_in_a_completion_has_its_place(fields, param):
    """
    It is a 400 that names the field, before anything is computed.
    """
    asked = {"prompt": "a", "max_tokens": 1} | fields
    async with fake_engine() as engine, talking(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="a", **asked)
        n_submitted = engine.stats().submitted

    assert (caught.value.param, n_submitted) == (param, 0)
