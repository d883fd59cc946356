"""Control tokens of a real vocabulary: in the text where asked, and as delimiters of a reply."""

from __future__ import annotations

import pytest

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.replies.spec import ReplySpec
from pyllama_raw.results import StopString
from scripts.tiny_models.vocab import SEP
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]

FORCED = SamplingParams(max_tokens=2, temperature=0, logit_bias={SEP: 1e6})
CHAT = [{"role": "user", "content": "a"}]


async def test_names_are_text_where_asked():
    """
    The engine finds them in stop strings, too.
    """
    async with AsyncEngine.open(tiny_model("llama")) as engine:
        plain = await engine.complete("a", FORCED)
        named = await engine.complete("a", FORCED.model_copy(update={"special": True}))
        stop = {"special": True, "stop": ("sep|><|se",), "max_tokens": 4}
        stopped = await engine.complete("a", FORCED.model_copy(update=stop))

    assert (plain.text, named.text) == ("", "<|sep|><|sep|>")
    assert stopped.text == "<|"
    assert stopped.finish_detail == StopString("sep|><|se")
    assert stopped.token_ids == (SEP, SEP)


async def test_delimiters_are_tokens_of_the_vocabulary():
    """
    A specification is bound to them: the token begins reasoning.
    """
    spec = ReplySpec.model_validate(
        {"reasoning": {"start": ["<|sep|>"], "end": ["<|pad|>"]}}
    )
    params = SamplingParams(max_tokens=8, temperature=0, lark='start: <|sep|> "AA"')
    async with AsyncEngine.open(tiny_model("llama")) as engine:
        thought = await engine.complete(CHAT, params, reply=spec)
        said = await engine.complete(CHAT, params)

    assert (thought.reasoning, thought.text) == ("AA", "")
    assert said.text == "AA"
    assert thought.token_ids == said.token_ids
    assert said.token_ids[0] == SEP
