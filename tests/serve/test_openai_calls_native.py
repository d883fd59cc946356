"""Calls that a request demands, of a model with random weights, over HTTP."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import pytest
from anyio import to_thread

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig
from pyllama_raw.api.model import Opener
from tests.serve.calls import joined, seen
from tests.serve.clients import chat_chunks, talking
from tests.support.replying import TEMPLATE
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]

CONFIG = EngineConfig(context=ContextConfig(n_ctx=4096, n_threads=1))
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}


def tool(name: str, **fields: object) -> dict[str, object]:
    parameters = {
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": parameters} | fields
    return {"type": "function", "function": function}


TOOLS = [tool("weather"), tool("time", strict=True)]
NAMED = {"type": "function", "function": {"name": "time"}}
ALLOWED = {"mode": "required", "tools": [NAMED]}
BOTH = {"weather", "time"}
CHOICES = {  # fields, the names that may be called, and how often at most
    "required": ({"tool_choice": "required"}, BOTH, 99),
    "named": ({"tool_choice": NAMED}, {"time"}, 1),
    "allowed": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        {"time"},
        99,
    ),
    "one": ({"tool_choice": "required", "parallel_tool_calls": False}, BOTH, 1),
}
FREE = {
    "auto": {"tool_choice": "auto"},
    "at most one": {"parallel_tool_calls": False},
}
ASKED = {
    "messages": [{"role": "user", "content": "Rain?"}],
    "tools": TOOLS,
    "max_tokens": 300,
    "logit_bias": {str(ord("o")): 100},  # <tool_call>, as it would <think> for ever
}


@asynccontextmanager
async def calling() -> AsyncIterator[AsyncEngine]:
    """A tiny model whose template has tools."""
    path = tiny_model("llama")
    parts = await to_thread.run_sync(Opener(path, CONFIG, None).parts, lambda _: True)
    async with AsyncEngine(replace(parts, chat_template=TEMPLATE)) as engine:
        yield engine


async def same(client: openai.AsyncOpenAI, **fields: object):
    """A choice, which a stream tells too."""
    asked = ASKED | fields
    whole = await client.chat.completions.create(model="a", **asked)
    chunks = await chat_chunks(client, [], **asked)
    assert joined(chunks) == seen(whole.choices[0].message)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    return whole.choices[0]


@pytest.mark.parametrize("choice", CHOICES)
async def test_calls_are_those_that_are_demanded(choice):
    """
    By their names, their number and their schemas, for a client that checks all types.
    """
    fields, names, most = CHOICES[choice]
    async with calling() as engine, talking(engine) as client:
        told = [await same(client, **fields, seed=seed) for seed in range(4)]
    ended = [each for each in told if each.finish_reason != "length"]

    assert ended
    for each in ended:
        calls = [call.function for call in each.message.tool_calls]
        assert each.finish_reason == "tool_calls"
        assert {call.name for call in calls} <= names
        assert 1 <= len(calls) <= most
        cities = [json.loads(call.arguments)["city"] for call in calls]
        assert {*cities} <= {*CITY["enum"]}


@pytest.mark.parametrize("choice", FREE)
async def test_a_model_that_may_call_is_free_not_to(choice):
    """
    Text is an answer, and a stream of it is the same.
    """
    async with calling() as engine, talking(engine) as client:
        told = await same(client, **FREE[choice], seed=1)

    assert told.message.content


async def test_a_demand_that_cannot_be_kept_has_its_place():
    """
    A schema of a strict tool is a 400 that names the field; one that is not strict is relaxed,
    and the form of an answer stands beside calls.
    """
    value = {"type": "string", "pattern": "(?=a)"}
    parameters = {"type": "object", "properties": {"a": value}}
    form = {"type": "json_object"}
    strict, loose = (
        tool("f", parameters=parameters, strict=on) for on in (True, False)
    )
    params = []
    async with calling() as engine, talking(engine) as client:
        demand = ASKED | {"tool_choice": "required"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="a", **demand | {"tools": [strict]}
            )
        params.append(caught.value.param)
        for fields in ({"tools": [loose]}, {"response_format": form}):
            await client.chat.completions.create(model="a", **demand | fields)

    assert params == ["tools"]
