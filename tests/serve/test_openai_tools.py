"""Chats that call tools and think, in OpenAI's words."""

import json

import httpx
import openai
import pytest

from tests.serve.calls import joined, seen
from tests.serve.clients import chat_chunks, talking
from tests.support.limits import LIMIT_S
from tests.support.replying import TEMPLATE, TOOL, reply_engine

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "Rain?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Öl"}}\n</tool_call>'
OTHER = {"type": "function", "function": {"name": "time", "parameters": {}}}
NEXT = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
REPLIES = {
    "text": "Yes.",
    "thought": "<think>\nHm.\n</think>\n\nYes.",
    "call": CALL,
    "all": f"<think>\nHm.\n</think>\n\nLet me see.{CALL}\n{NEXT}",
    "broken": '<tool_call>\n{"name": "weather", "arg',
    "unclosed": "<think>\nHm.",
}
ASKED = {"messages": CHAT, "tools": [TOOL, OTHER], "max_tokens": 512}


@pytest.mark.parametrize("more", [{}, {"logprobs": True}], ids=["plain", "logprobs"])
@pytest.mark.parametrize("reply", REPLIES)
async def test_a_stream_of_calls_is_the_whole_answer(reply, more):
    """
    Reasoning, text and calls are the same either way, for a client that checks all types; the
    log-probabilities are those of all tokens.
    """
    async with reply_engine(REPLIES[reply]) as engine, talking(engine) as client:
        create = client.chat.completions.create
        whole = await create(model="a", **ASKED, **more)
        chunks = await chat_chunks(
            client, [], **ASKED, **more, stream_options={"include_usage": True}
        )

    [choice] = whole.choices
    assert joined(chunks) == seen(choice.message)
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage
    listed = [
        entry
        for chunk in chunks[:-1]
        for each in chunk.choices
        if each.logprobs
        for entry in each.logprobs.content
    ]
    assert listed == (choice.logprobs.content if more else [])


async def test_an_answer_has_calls_and_reasoning_apart():
    """
    Content is null beside calls alone; the tokens of reasoning are counted.
    """
    async with reply_engine(REPLIES["all"]) as engine, talking(engine) as client:
        told = await client.chat.completions.create(model="a", **ASKED)
    async with reply_engine(REPLIES["call"]) as engine, talking(engine) as client:
        bare = await client.chat.completions.create(model="a", **ASKED)

    message = told.choices[0].message
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls]
    assert calls == [("weather", '{"city": "Öl"}'), ("time", "{}")]
    assert (message.content, message.reasoning_content) == ("Let me see.", "Hm.")
    assert told.choices[0].finish_reason == "tool_calls"
    assert told.usage.completion_tokens_details.reasoning_tokens > 0
    assert bare.choices[0].message.content is None
    assert bare.usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_call_that_is_cut_ends_by_length():
    """
    What there is of it is told, because nothing of an answer is lost.
    """
    n_most = len(CALL) - 20
    async with reply_engine(CALL) as engine, talking(engine) as client:
        asked = ASKED | {"max_tokens": n_most}
        told = await client.chat.completions.create(model="a", **asked)

    assert told.choices[0].finish_reason == "length"
    assert told.choices[0].message.tool_calls[0].function.name == "weather"


THOUGHT = REPLIES["thought"]
FORMS = [
    ({}, THOUGHT, {"reasoning_content": "Hm.", "content": "Yes."}),
    ({"reasoning_format": "none"}, THOUGHT, {"content": THOUGHT}),
    ({"parse_tool_calls": False, "tools": [TOOL]}, NEXT, {"content": NEXT}),
    (
        {"reasoning_format": "none", "tools": [TOOL]},
        THOUGHT,
        {"content": "Hm.Yes."},
    ),
    ({"tool_choice": "none", "tools": [TOOL]}, NEXT, {"content": NEXT}),
]


@pytest.mark.parametrize(("fields", "reply", "expected"), FORMS)
async def test_clients_may_want_the_text_as_it_is_written(fields, reply, expected):
    """
    By the fields of llama.cpp's server, or because no tool may be called.
    """
    async with reply_engine(reply) as engine, talking(engine) as client:
        told = await client.chat.completions.create(
            model="a", messages=CHAT, max_tokens=99, extra_body=fields
        )

    fields = told.choices[0].message.model_dump(exclude_none=True)
    assert fields == {"role": "assistant"} | expected


async def test_reasoning_may_have_an_alias():
    """
    Both names tell the same, in streams too.
    """
    async with reply_engine(THOUGHT) as engine:
        async with talking(engine, reasoning_alias=True) as client:
            chunks = await chat_chunks(client, [], messages=CHAT)

    told = joined(chunks)
    assert (told["reasoning"], told["reasoning_content"]) == ("Hm.", "Hm.")


VARIABLES = "{{ reasoning_effort }} {{ enable_thinking }}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "low"}, "low "),
        ({"reasoning_effort": "none"}, "none False"),
        (
            {
                "reasoning_effort": "none",
                "chat_template_kwargs": {"enable_thinking": True},
            },
            "none True",
        ),
    ],
)
async def test_the_effort_of_reasoning_reaches_the_template(fields, expected):
    """
    As a variable, which the variables of a request overrule.
    """
    template = TEMPLATE.replace(
        "<|im_start|>assistant", f"{VARIABLES}<|im_start|>assistant"
    )
    async with reply_engine("a", template=template) as engine:
        async with talking(engine) as client:
            url = f"{client.base_url}chat/completions"
            body = {"messages": CHAT, "max_tokens": 1, "verbose": True} | fields
            async with httpx.AsyncClient(timeout=LIMIT_S) as http:
                told = (await http.post(url, json=body)).json()

    assert f"{expected}<|im_start|>" in told["__verbose"]["prompt"]


async def test_only_allowed_tools_are_told():
    """
    `allowed_tools` leaves the others out.
    """
    chosen = {"type": "function", "function": {"name": "time"}}
    allowed = {"mode": "auto", "tools": [chosen]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    async with reply_engine("a", "a") as engine, talking(engine) as client:
        create = client.chat.completions.create
        some = await create(model="a", **ASKED, tool_choice=choice)
        one = await create(model="a", **(ASKED | {"tools": [OTHER]}))

    assert some.usage.prompt_tokens == one.usage.prompt_tokens


def chosen(name: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def called(*calls: object) -> dict[str, object]:
    said = {"role": "assistant", "content": None, "tool_calls": [*calls]}
    return {"messages": [*CHAT, said]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1]"),
        ({"tool_choice": "weather"}, "tool_choice"),
        ({"tool_choice": chosen("rain")}, "tool_choice"),
        ({"tool_choice": chosen("none")}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"reasoning_format": "x"}, "reasoning_format"),
    ],
)
async def test_a_mistake_with_tools_has_its_place(fields, param):
    """
    It is a 400 that names the field.
    """
    async with reply_engine("a") as engine, talking(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="a", extra_body=ASKED | fields, messages=CHAT
            )

    assert caught.value.param == param


@pytest.mark.parametrize(
    "messages",
    [
        called({"function": {"name": "f", "arguments": '{"a": '}})["messages"],
        [*CHAT, {"role": "tool", "content": "dry"}],
        [*called(chosen("f"))["messages"], {"role": "tool", "content": None}],
    ],
)
async def test_history_that_others_wrote_badly_is_rendered(messages):
    """
    Malformed arguments, no ids, and results without calls do not end a session.
    """
    async with reply_engine("a", "a") as engine, talking(engine) as client:
        asked = ASKED | {"messages": messages}
        told = await client.chat.completions.create(model="a", **asked)

    assert told.choices[0].message.content is not None


async def test_a_loop_runs_tools():
    """
    What an answer calls and what the tool says are the history of the next answer.
    """
    messages = [*CHAT]
    async with (
        reply_engine(REPLIES["all"], "Dry.") as engine,
        talking(engine) as client,
    ):
        asked = ASKED | {"messages": messages}
        told = (await client.chat.completions.create(model="a", **asked)).choices[0]
        messages.append(told.message.model_dump(exclude_none=True))
        for call in told.message.tool_calls:
            said = json.dumps({"of": json.loads(call.function.arguments)})
            result = {"role": "tool", "tool_call_id": call.id, "content": said}
            messages.append(result)
        last = await client.chat.completions.create(model="a", **asked)

    assert last.choices[0].message.content == "Dry."
