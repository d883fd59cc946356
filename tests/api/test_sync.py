"""The helper for programs that are not async."""

from contextlib import asynccontextmanager

import pytest

import pyllama_raw
from pyllama_raw import AsyncEngine, Result, SamplingParams
from pyllama_raw.sync import are_many
from pyllama_raw.testing import fake_engine


@pytest.mark.parametrize(
    ("prompt", "many"),
    [
        ("text", False),
        ([1, 2], False),
        ([{"role": "user", "content": "a"}], False),
        ([], False),
        (["a", "b"], True),
        ([[1, 2], [3]], True),
        ([[{"role": "user", "content": "a"}]], True),
    ],
)
def test_lists_of_prompts_are_told_from_prompts(prompt, many):
    """
    Token ids and messages are one prompt; a list of those is many.
    """
    assert are_many(prompt) is many


def test_one_prompt_gives_one_result_and_many_a_list(monkeypatch):
    """
    The same engine serves both; model and options reach it.
    """
    opened = []

    @asynccontextmanager
    async def fake_open(model, config):
        opened.append((model, config))
        async with fake_engine() as engine:
            yield engine

    monkeypatch.setattr(AsyncEngine, "open", fake_open)
    params = SamplingParams(max_tokens=2)

    one = pyllama_raw.generate("a", params, model="m.gguf")
    many = pyllama_raw.generate(["a", "b"], params)

    assert isinstance(one, Result)
    assert [len(result.token_ids) for result in many] == [2, 2]
    assert opened == [("m.gguf", None), (None, None)]
