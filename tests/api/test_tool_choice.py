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
from pyllama_raw.errors import BadGrammar, BadSchema, InvalidRequest
from pyllama_raw.options.chat_templates import TEMPLATES
from pyllama_raw.replies.spec import ReplySpec, bundled
from tests.support.replying import TEMPLATE
from tests.support.tiny import tiny_model

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

pytestmark = [pytest.mark.native, pytest.mark.anyio]

CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=2048, n_threads=1), scheduler=SchedulerConfig(n_slots=1)
)
CHAT = [{"role": "user", "content": "Rain?"}]
HERMES = TEMPLATES["hermes"]
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
    A strict tool promises that its arguments fit.
    """
    bad = tool("bad", strict=True)
    bad["function"]["parameters"] = {"properties": {"a": {"not": {"const": 1}}}}

    with pytest.raises(BadSchema, match="'bad'") as caught:
        await replies(engine, [bad], tool_choice="required")

    assert caught.value.name == "tools"


async def test_a_tool_that_is_not_strict_fails_no_request(engine, caplog):
    """
    What no grammar has is left out, told in the log and counted; what is left holds.
    """
    loose = tool("loose")
    texts = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}
    loose["function"]["parameters"]["properties"]["n"] = {**texts, "maxItems": 1}
    n_before = engine.stats().relaxed_schemas

    for family in ("hermes", "qwen3_coder", "gemma4"):
        for result in await replies(
            engine, [loose], tool_choice="required", reply=bundled()[family]
        ):
            arguments = [json.loads(call.arguments) for call in result.tool_calls]
            assert all(each in ({"n": []}, {"n": ["a"]}) for each in arguments)

    assert "'loose'" in caplog.text
    assert "properties.n.uniqueItems" in caplog.text
    assert engine.stats().relaxed_schemas == n_before + 3 * len(SEEDS)


async def test_a_call_without_tools_is_refused_with_the_reason(engine):
    """
    The choices that are allowed then are others.
    """
    with pytest.raises(InvalidRequest, match="there are no tools") as caught:
        await engine.complete(CHAT, tool_choice="required", chat_template=TEMPLATE)

    assert caught.value.name == "tool_choice"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ignore_eos", {"ignore_eos": True}),
        ("min_tokens", {"min_tokens": 1}),
        ("grammar_triggers", {"grammar": 'root ::= "a"', "grammar_triggers": ("a",)}),
    ],
)
async def test_what_does_not_go_with_a_call_is_named(engine, name, more):
    """
    A demanded call is the end of the reply, and begins where its syntax says.
    """
    params = SamplingParams(max_tokens=9, **more)

    with pytest.raises(InvalidRequest) as caught:
        await engine.complete(
            CHAT, params, tools=TOOLS, tool_choice="required", chat_template=TEMPLATE
        )

    assert caught.value.name == name


async def test_a_form_of_the_answer_goes_with_every_choice(engine):
    """
    The model may call instead, must call, or is told of no tool.
    """
    params = SamplingParams(max_tokens=200, regex="[0-9]{3}", seed=1, temperature=1)
    template = f"{TEMPLATE}<think>\n\n</think>\n\n"

    async def told(choice: str):
        tools = [tool("wait", strict=True)]
        options = {"tools": tools, "tool_choice": choice, "chat_template": template}
        return await engine.complete(CHAT, params, **options)

    may, must, none = await told("auto"), await told("required"), await told("none")

    assert bool(may.tool_calls) != bool(may.text)
    assert must.tool_calls
    assert not must.text
    assert len(none.text) == 3


async def test_a_form_of_the_answer_holds_where_no_syntax_of_calls_is_known(engine):
    """
    Nothing that the model writes is a call then.
    """
    params = SamplingParams(max_tokens=9, regex="[0-9]{3}", seed=1)
    options = {"tools": TOOLS, "chat_template": TEMPLATE, "reply": ReplySpec()}

    result = await engine.complete(CHAT, params, **options)

    assert len(result.text) == 3


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"const": "<think>"}},
        {"regex": "a/b\n"},
        {"lark": 'start: "a" | "}"'},
        {"grammar": 'root ::= "a" | [b-c]'},
    ],
)
@pytest.mark.parametrize("begins", ["<think>", ""])
async def test_a_chat_that_may_think_has_its_form_in_the_answer(engine, form, begins):
    """
    Without options of replies, too: thoughts are apart, and the text is what was asked for.
    """
    spec = ReplySpec.model_validate({"reasoning": {"end": ["<|sep|>"]}})
    params = SamplingParams(
        max_tokens=200, seed=1, temperature=1, logit_bias={318: 8}, **form
    )
    plain = SamplingParams(max_tokens=200, seed=1, temperature=1, **form)

    thought = await engine.complete(
        CHAT, params, reply=spec, chat_template=TEMPLATE + begins
    )
    off = await engine.complete(
        CHAT,
        plain,
        chat_template=TEMPLATE,
        template_kwargs={"enable_thinking": False},
    )

    texts = ('"<think>"', "a/b\n", "a", "}", "b", "c")
    assert thought.finish_reason is off.finish_reason is FinishReason.STOP
    assert thought.text in texts
    assert thought.reasoning or not begins
    assert (off.text in texts, off.reasoning) == (True, "")


async def test_a_model_that_does_not_think_has_a_form_from_the_first_token_on(engine):
    """
    Also where others write their thoughts and calls as it writes its calls.
    """
    [opening] = await engine.tokenize("<", add_special=False)
    params = SamplingParams(max_tokens=9, regex="[0-9]{3}", logit_bias={opening: 100})
    think = "{# <think> #}"

    plain = await engine.complete(CHAT, params, reply=True, chat_template=HERMES)
    other = await engine.complete(
        CHAT, params, reply=True, chat_template=HERMES + think
    )

    assert (len(plain.text), plain.reasoning) == (3, "")
    assert other.text == ""


async def test_a_mistake_in_a_form_is_told_as_without_thoughts(engine):
    """
    The error names the field, whatever the reply has around the answer.
    """
    options = {"chat_template": TEMPLATE + "<think>", "reply": True}
    for name, value, error in [
        ("json_schema", {"not": {}}, BadSchema),
        ("regex", "(", BadSchema),
        ("lark", "start: b", BadSchema),
        ("grammar", "root ::= b", BadGrammar),
    ]:
        params = SamplingParams(max_tokens=9, **{name: value})
        with pytest.raises(error) as caught:
            await engine.complete(CHAT, params, **options)
        assert getattr(caught.value, "name", "grammar") == name
