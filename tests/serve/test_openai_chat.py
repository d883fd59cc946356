"""Chats in OpenAI's words: streams and answers at once are the same, mistakes have places."""

import json
from typing import Any

import openai
import pytest

from pyllama_raw.serve import make_app
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.serve.clients import chat_chunks, joined_chat, talking, whole_chat
from tests.serve.support import TEMPLATE, chatting, client_of
from tests.support.replying import reply_engine

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "a chat"}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "Well"}]
WITH_TOOLS = TEMPLATE + "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FORMS = {
    "plain": {},
    "n": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "only logprobs": {"logprobs": True},
    "stop": {"stop": ["zz", "m", "j"]},
    "a stop": {"stop": "c"},
    "length": {"max_completion_tokens": 2},
    "usage": {"stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_stream_of_a_chat_is_the_whole_answer(form):
    """
    Text, reasons and log-probabilities of each choice, for a client that checks all types.
    """
    asked = {"messages": MESSAGES, "seed": 1, "max_tokens": 9} | FORMS[form]
    if form == "length":
        del asked["max_tokens"]
    at_once = {name: value for name, value in asked.items() if "stream" not in name}
    async with chatting() as engine, talking(engine) as client:
        whole = await client.chat.completions.create(model="a", **at_once)
        chunks = await chat_chunks(client, [], **asked)

    told = whole_chat(whole)
    assert joined_chat(chunks) == told
    assert [*told] == list(range(asked.get("n", 1)))
    expected = "stop" if "stop" in form else "length"
    assert {reason for _, reason, _ in told.values()} == {expected}
    if "logprobs" in form:
        [(text, _, entries)] = told.values()
        assert "".join(entry.token for entry in entries) == text
        assert bytes(entries[0].bytes).decode() == entries[0].token
        assert len(entries[0].top_logprobs) == asked.get("top_logprobs", 0)
    if form == "usage":
        assert chunks[-1].usage == whole.usage
        assert {chunk.usage for chunk in chunks[:-1]} == {None}


def said(content) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "a"}, content]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": 3, "content": "a"}]}, "messages[0].role"),
        (said({"role": "user", "content": 3}), "messages[1].content"),
        (
            said({"role": "user", "content": [{"text": "a"}]}),
            "messages[1].content[0].type",
        ),
        (
            said({"role": "user", "content": [{"type": "text"}, PICTURE]}),
            "messages[1].content[0].text",
        ),
        (
            said({"role": "user", "content": [{"type": "file"}]}),
            "messages[1].content[0]",
        ),
        ({"messages": [{"role": "poet", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a" * 200}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tools": [TOOL]}, "tools"),  # the template prints none
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        (
            {"messages": BEGUN, "extra_body": {"add_generation_prompt": True}},
            "add_generation_prompt",
        ),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
async def test_a_mistake_in_a_chat_has_its_place(fields, param):
    """
    It is a 400 that names the field, before anything is computed.
    """
    asked = {"messages": MESSAGES, "max_tokens": 1} | fields
    async with chatting() as engine, talking(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="a", **asked)
        n_submitted = engine.stats().submitted

    assert (caught.value.param, n_submitted) == (param, 0)


async def test_tools_reach_the_template_unless_none_may_be_called():
    """
    The prompt is longer by what the template prints of them; harmless fields are let be.
    """
    asked = {"model": "a", "messages": MESSAGES, "max_tokens": 1, "user": "me"}
    counts = []
    async with chatting(chat_template=WITH_TOOLS) as engine, talking(engine) as c:
        for choice in ("auto", "none"):
            answer = await c.chat.completions.create(
                **asked, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
            )
            counts.append(answer.usage.prompt_tokens)

    assert counts[0] - counts[1] == len("[weather]")


async def test_a_call_that_nobody_knows_how_to_write_cannot_be_demanded():
    """
    It is a 400 that names the choice, because the template prints no calls.
    """
    asked = {"model": "a", "messages": MESSAGES, "tools": [TOOL]}
    async with chatting(chat_template=WITH_TOOLS) as engine, talking(engine) as c:
        with pytest.raises(openai.BadRequestError) as caught:
            await c.chat.completions.create(**asked, tool_choice="required")

    assert caught.value.param == "tool_choice"


async def test_what_the_assistant_has_begun_goes_on():
    """
    As with continue_final_message, which says what is so.
    """
    more = {"continue_final_message": True, "add_generation_prompt": False}
    async with chatting() as engine, talking(engine) as client:
        create = client.chat.completions.create
        first = await create(model="a", messages=BEGUN, max_tokens=4)
        second = await create(model="a", messages=BEGUN, max_tokens=4, extra_body=more)

    assert first.choices[0].message.content == second.choices[0].message.content


async def test_an_error_in_the_midst_of_a_stream_is_an_event():
    """
    The client has the text before it, and is told.
    """
    executor = FakeExecutor(fake_limits(), failing_rows=frozenset({(3, 1)}))
    chunks = []
    async with chatting(executor) as engine, talking(engine) as client:
        with pytest.raises(openai.APIError) as caught:
            await chat_chunks(client, chunks, messages=MESSAGES, max_tokens=9)

    [(text, reason, _)] = joined_chat(chunks).values()
    assert text != ""
    assert reason is None
    assert caught.value.code == "sampling_failed"


BREAKING = "a\u2028b\u2029c\x85d"
ASKING = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/completions", {"prompt": ASKING}),
        ("/completion", {"prompt": ASKING}),
    ],
)
async def test_an_event_is_one_line_for_all_clients(path, body):
    """
    Signs that Python's splitlines() takes for ends of lines are escapes, as they may stand in a text.
    """
    async with reply_engine(BREAKING) as engine:
        async with client_of(make_app({"a": engine})) as client:
            answer = await client.post(
                path, json=body | {"stream": True, "max_tokens": 99}
            )

    lines = answer.text.splitlines()
    assert lines == answer.text.split("\n")[:-1]
    frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(_text_of(frame) for frame in frames)
    assert text == BREAKING


def _text_of(frame: Any) -> str:
    """The text that a frame of any dialect adds."""
    if "choices" in frame:
        [choice] = frame["choices"]
        text = choice.get("text") or choice.get("delta", {}).get("content")
    else:
        delta = frame.get("delta", frame.get("content"))
        text = delta.get("text") if isinstance(delta, dict) else delta
    return text or ""
