"""A random model calls tools as requests ask it to."""

from __future__ import annotations

import json

import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    FinishReason,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.errors import BadSchema, InvalidRequest
from pyllama_raw.replies.spec import bundled
from tests.replying import TEMPLATE
from tests.tiny import tiny_model

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

pytestmark = [pytest.mark.native, pytest.mark.anyio]

CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=2048, n_threads=1), scheduler=SchedulerConfig(n_slots=1)
)
CHAT = [{"role": "user", "content": "Rain?"}]
SEEDS = range(4)


def tool(name: str, **more) -> dict:
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, **more},
    }


TOOLS = [tool("look_up"), tool("wait")]
PARAMETERS = TOOLS[0]["function"]["parameters"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine():
    async with AsyncEngine.open(tiny_model("llama"), CONFIG) as opened:
        yield opened


async def replies(engine, tools=TOOLS, **options) -> list:
    """Replies that ended by themselves; the prompt ends reasoning."""
    template = f"{TEMPLATE}<think>\n\n</think>\n\n"
    found = []
    for seed in SEEDS:
        result = await engine.complete(
            CHAT,
            SamplingParams(max_tokens=200, seed=seed, temperature=1),
            **{"tools": tools, "chat_template": template, **options},
        )
        if result.finish_reason is FinishReason.STOP:
            found.append(result)
    assert found
    return found


@pytest.mark.parametrize(
    "family", ["hermes", "qwen3_coder", "gemma4", "mistral", "lfm2"]
)
async def test_the_tool_of_the_name_is_called_once(engine, family):
    """
    The reply is one call with arguments by its schema, in the syntax of each family.
    """
    spec = bundled()[family]

    for result in await replies(engine, tool_choice="wait", reply=spec):
        [call] = result.tool_calls
        assert (call.name, result.text) == ("wait", "")
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)


async def test_required_means_some_tool(engine):
    """
    All that is there are calls; without parallel ones it is one.
    """
    several = await replies(engine, tool_choice="required")
    one = await replies(engine, tool_choice="required", parallel_tool_calls=False)

    calls = [call for result in [*several, *one] for call in result.tool_calls]
    assert {call.name for call in calls} == {"look_up", "wait"}
    assert all(result.tool_calls and not result.text for result in several)
    assert all(len(result.tool_calls) == 1 and not result.text for result in one)
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)


async def test_strict_tools_leave_text_free(engine):
    """
    A random model writes text, which is not made to call.
    """
    strict = [tool("look_up", strict=True)]

    result = await engine.complete(
        CHAT,
        SamplingParams(max_tokens=30, seed=1),
        tools=strict,
        chat_template=TEMPLATE,
    )
    assert result.text or result.reasoning


async def test_a_schema_that_cannot_be_kept_names_its_tool(engine):
    """
    It is never left out in silence.
    """
    bad = tool("bad")
    bad["function"]["parameters"] = {"properties": {"a": {"not": {"const": 1}}}}

    with pytest.raises(BadSchema, match="'bad'") as caught:
        await replies(engine, [bad], tool_choice="required")

    assert caught.value.name == "tools"


@pytest.mark.parametrize(
    ("name", "value"),
    [("json_schema", {"type": "object"}), ("regex", "a"), ("ignore_eos", True)],
)
async def test_one_request_has_one_constraint(engine, name, value):
    """
    The parameter that asks for something else is named.
    """
    params = SamplingParams(max_tokens=9, **{name: value})

    with pytest.raises(InvalidRequest) as caught:
        await engine.complete(
            CHAT, params, tools=TOOLS, tool_choice="required", chat_template=TEMPLATE
        )

    assert caught.value.name == name
