"""The helper for programs that are not async."""

import threading

import pytest

import pyllama_raw
from pyllama_raw import AsyncEngine, EngineConfig, Result, SamplingParams
from pyllama_raw.api.loading import Opening
from pyllama_raw.api.sync import are_many, kept
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
    """What was opened, as fakes; nothing is kept from or for other tests."""
    found = []

    def fake_open(model, config, *, progress=None, needs=None):
        async def make():
            found.append((model, config))
            return fake_engine()

        return Opening(make)

    monkeypatch.setattr(AsyncEngine, "open", fake_open)
    kept.close()
    yield found
    kept.close()


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


def test_the_model_is_kept_between_calls(opened):
    """
    Calls with the same model and options share one engine; another one replaces it.
    """
    params = SamplingParams(max_tokens=2)
    config = EngineConfig(deterministic=True)
    for _ in range(3):
        pyllama_raw.generate("a", params, model="m.gguf")
    pyllama_raw.generate("a", params, model="m.gguf", config=config)
    names = [thread.name for thread in threading.enumerate()]

    assert opened == [("m.gguf", None), ("m.gguf", config)]
    assert (names.count("pyllama-engine"), names.count("pyllama-loop")) == (1, 1)


def test_a_file_that_has_changed_is_loaded_anew(opened, tmp_path):
    """
    What is kept is a file's content, not its name.
    """
    path, params = tmp_path / "m.gguf", SamplingParams(max_tokens=2)
    for content in ("a", "a", "bc"):
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
        pyllama_raw.generate("a", params, model=path)

    assert opened == [(path, None), (path, None)]


def test_who_uses_an_engine_keeps_it(opened):
    """
    A call with another model beside a running one does not end that.
    """
    params = SamplingParams(max_tokens=2)
    with kept.engine("one.gguf", None) as engine:
        pyllama_raw.generate("a", params, model="two.gguf")
        result = engine.complete("a", params)

    assert len(result.token_ids) == 2
    assert [model for model, _ in opened] == ["one.gguf", "two.gguf"]


@pytest.mark.anyio
async def test_it_works_where_an_event_loop_runs(opened):
    """
    A notebook's cell calls it, though a loop runs in its thread.
    """
    result = pyllama_raw.generate("a", SamplingParams(max_tokens=2))

    assert len(result.token_ids) == 2
