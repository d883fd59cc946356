"""The helper for programs that are not async."""

import threading

import pytest

import pyllama_raw
from pyllama_raw import AsyncEngine, Result, SamplingParams
from pyllama_raw.api.blocking import are_many
from pyllama_raw.api.model import Opening
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


@pytest.fixture
def opened(monkeypatch):
    """What was opened, as fakes."""
    found = []

    def fake_open(model, config, *, progress=None, needs=None):
        async def make():
            found.append((model, config))
            return fake_engine()

        return Opening(make)

    monkeypatch.setattr(AsyncEngine, "open", fake_open)
    return found


def test_one_prompt_gives_one_result_and_many_a_list(opened):
    """
    The same engine serves both; model and options reach it.
    """
    params = SamplingParams(max_tokens=2)

    one = pyllama_raw.generate("a", params, model="m.gguf")
    many = pyllama_raw.generate(["a", "b"], params)

    assert isinstance(one, Result)
    assert [len(result.token_ids) for result in many] == [2, 2]
    assert opened == [("m.gguf", None), (None, None)]


def test_nothing_is_left_of_a_call(opened):
    """
    Its engine and its event loop have ended.
    """
    pyllama_raw.generate("a", SamplingParams(max_tokens=2))
    names = [thread.name for thread in threading.enumerate()]

    assert (names.count("pyllama-engine"), names.count("pyllama-loop")) == (0, 0)


@pytest.mark.anyio
async def test_it_works_where_an_event_loop_runs(opened):
    """
    A notebook's cell calls it, though a loop runs in its thread.
    """
    result = pyllama_raw.generate("a", SamplingParams(max_tokens=2))

    assert len(result.token_ids) == 2
