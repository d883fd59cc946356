"""The dialect of messages, by its own client, which is strict."""

import base64
import json

import anthropic
import httpx
import pytest

from pyllama_raw.serve import make_app
from pyllama_raw.serve.messages import MessagesBody, read
from tests.media.files import image_file
from tests.serve.agent_clients import joined_message, message_events, messaging
from tests.serve.support import request_of
from tests.serve.test_openai_native import seeing
from tests.support.limits import LIMIT_S
from tests.support.replying import TOOL, reply_engine

pytestmark = pytest.mark.anyio

FUNCTION = TOOL["function"]
TOOLS = [{"name": "weather", "input_schema": FUNCTION["parameters"]}]
USER = {"role": "user", "content": "Rain?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Öl"}}\n</tool_call>'
REPLY = f"<think>\nHm, rain.\n</think>\n\nLet me see.{CALL}{CALL}"
BLOCKS = [
    ("thinking", "", "Hm, rain."),
    ("text", "", "Let me see."),
    ("tool_use", "weather", '{"city": "Öl"}'),
    ("tool_use", "weather", '{"city": "Öl"}'),
]


@pytest.fixture
def anyio_backend():
    return "asyncio"  # that of the client


def blocks_of(message):
    """Kind, name and text of each block."""
    return [
        (
            block.type,
            getattr(block, "name", ""),
            json.dumps(block.input, ensure_ascii=False)
            if block.type == "tool_use"
            else getattr(block, "text", None) or block.thinking,
        )
        for block in message.content
    ]


async def test_a_message_is_made_of_blocks_whole_and_streamed():
    """
    Thoughts, text and each call are a block of their own, in the same order.
    """
    asked = {"messages": [USER], "tools": TOOLS, "max_tokens": 500}
    async with reply_engine(REPLY) as engine, messaging(engine) as client:
        whole = await client.messages.create(model="a", **asked)
        events = await message_events(client, **asked)

    assert blocks_of(whole) == joined_message(events) == BLOCKS
    assert whole.stop_reason == events[-2].delta.stop_reason == "tool_use"
    assert whole.usage.output_tokens == events[-2].usage.output_tokens
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens


async def test_events_of_a_stream_have_an_order():
    """
    Each block begins, goes on and ends before the next one; a signature ends thoughts.
    """
    asked = {"messages": [USER], "tools": TOOLS, "max_tokens": 500}
    async with reply_engine(REPLY) as engine, messaging(engine) as client:
        events = await message_events(client, **asked)

    kinds = [getattr(getattr(e, "delta", None), "type", None) or e.type for e in events]
    order = [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]
    begins, ends = "content_block_start", "content_block_stop"
    call = [begins, "input_json_delta", ends]
    assert order == [
        *("message_start", begins, "thinking_delta", "signature_delta", ends),
        *(begins, "text_delta", ends, *call, *call, "message_delta", "message_stop"),
    ]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["me"]}, "stop_sequence", "me"),
    ],
)
async def test_the_reason_of_an_end(fields, reason, sequence):
    """
    In the words of the dialect.
    """
    asked = {"messages": [USER], "max_tokens": 500} | fields
    async with reply_engine("Let me see.") as engine, messaging(engine) as client:
        whole = await client.messages.create(model="a", **asked)

    assert (whole.stop_reason, whole.stop_sequence) == (reason, sequence)


async def test_blocks_stand_where_the_model_wrote_them():
    """
    Also in a answer answer.
    """
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 500}
    reply = f"{CALL}Then.{CALL}"
    async with reply_engine(reply) as engine, messaging(engine) as client:
        answer = await client.messages.create(model="a", **body)
        events = await message_events(client, **body)

    kinds = [kind for kind, *_ in blocks_of(answer)]
    assert kinds == ["tool_use", "text", "tool_use"]
    assert blocks_of(answer) == joined_message(events)


async def test_a_call_that_was_cut_has_what_came():
    """
    And is no call that can be run.
    """
    asked = {"messages": [USER], "tools": TOOLS}
    cut = REPLY.index("Öl") - 1
    async with reply_engine(REPLY) as engine, messaging(engine) as client:
        whole = await client.messages.create(model="a", max_tokens=cut - 40, **asked)
        events = await message_events(client, max_tokens=cut - 40, **asked)

    assert whole.stop_reason == "max_tokens"
    assert [kind for kind, *_ in blocks_of(whole)] == [
        kind for kind, *_ in joined_message(events)
    ]


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        ({"type": "auto"}, {}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": "weather"}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"parallel_tool_calls": False},
        ),
    ],
)
async def test_choices_of_tools_are_those_of_the_engine(choice, options):
    """
    Tools that a server would run are left out.
    """
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
    body = MessagesBody(messages=[USER], tools=tools, tool_choice=choice)

    function = {"name": "weather", "parameters": FUNCTION["parameters"]}
    wanted = {"type": "function", "function": function}
    request, _ = await request_of(read, body)
    names = ("tools", "tool_choice", "parallel_tool_calls")
    assert {n: v for n, v in request.options.items() if n in names} == {
        "tools": [wanted],
        **options,
    }


async def test_a_tool_may_be_strict():
    """
    As functions of the other dialects.
    """
    tools = [TOOLS[0] | {"strict": True}, TOOLS[0] | {"strict": False}]
    body = MessagesBody(messages=[USER], tools=tools)

    request, _ = await request_of(read, body)

    flags = [tool["function"].get("strict") for tool in request.options["tools"]]
    assert flags == [True, None]


async def test_blocks_become_the_messages_of_a_template():
    """
    Results come before what the user says with them, and those of errors say so.
    """
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Öl"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "none"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "?"}
    said = {"type": "text", "text": "I see."}
    body = MessagesBody(
        system=[{"type": "text", "text": "Be kind."}],
        messages=[
            USER,
            {"role": "assistant", "content": [thought, hidden, said, call]},
            {"role": "user", "content": [said, result | {"is_error": True}]},
        ],
    )
    request, _ = await request_of(read, body)

    function = {"name": "weather", "arguments": {"city": "Öl"}}
    assert request.prompts[0] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "I see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Error: none", "tool_call_id": "1"},
        {"role": "user", "content": "I see."},
    ]
    assert request.origins == [
        *("system", "messages[0]", "messages[1]"),
        *("messages[2].content[1]", "messages[2]"),
    ]


async def test_a_mistake_is_an_error_of_the_dialect():
    """
    Wherever it is found: at the door, in the body, in the chat, or by the engine.
    """
    cases = {
        "model": {"model": "b", "messages": [USER]},
        "messages": {"messages": 3},
        "messages[0].content[0]": {
            "messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]
        },
        "n": {"messages": [USER], "n": 2},
        "tool_choice": {
            "messages": [USER],
            "tools": TOOLS,
            "tool_choice": {"type": "tool"},
        },
    }
    found = {}
    async with reply_engine(REPLY) as engine:
        transport = httpx.ASGITransport(make_app({"a": engine}))
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://here",
            timeout=LIMIT_S,
        ) as client:
            for param, body in cases.items():
                answer = (await client.post("/v1/messages", json=body)).json()
                found[param] = answer["type"], answer["error"]["param"]

    assert found == {param: ("error", param) for param in cases}


async def test_a_key_is_needed_in_the_words_of_the_dialect(tmp_path):
    """
    401 has the type that clients know.
    """
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")
    asked = {"model": "a", "messages": [USER], "max_tokens": 500}
    async with (
        reply_engine(REPLY) as engine,
        messaging(engine, api_keys_file=str(keys)) as client,
    ):
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**asked)
        answer = await client.with_options(api_key="sk-1").messages.create(**asked)

    assert caught.value.type == "authentication_error"
    assert answer.type == "message"


async def test_an_answer_has_its_id_where_clients_look_for_it():
    """
    In the header of the dialect, and in errors beside them.
    """
    ids = {"x-request-id": "of a client".replace(" ", "-")}
    body = {"messages": [USER], "max_tokens": 500, "extra_headers": ids}
    async with reply_engine(REPLY) as engine, messaging(engine) as client:
        answer = await client.messages.create(model="a", **body)
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(model="none", **body)

    assert answer._request_id == caught.value.request_id == "of-a-client"
    assert caught.value.body["request_id"] == "of-a-client"


async def test_documents_and_results_of_searches_have_their_heads():
    """
    A title, what is said of it, and where it is from stand above the text.
    """
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    content = [
        {
            "type": "document",
            "title": "T",
            "context": "C",
            "source": {"type": "text", "media_type": "text/plain", "data": "D"},
        },
        {"type": "document", "source": {"type": "content", "content": texts}},
        {"type": "search_result", "title": "T", "source": "http://s", "content": texts},
    ]
    body = MessagesBody(messages=[{"role": "user", "content": content}])

    request, _ = await request_of(read, body)

    [message] = request.prompts[0]
    parts = [part["text"] for part in message["content"]]
    assert parts == ["T\nC\nD", "a\nb", "T\nhttp://s\na\nb"]


@pytest.mark.native
@pytest.mark.parametrize("at", ["user", "result"])
async def test_images_are_seen(at):
    """
    Those of users, and those that tools give back; of these a broken one is only named.
    """
    data = base64.b64encode(image_file("PNG")).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image = {"type": "image", "source": source}
    call = {"type": "tool_use", "id": "1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
    chats = {
        "user": [{"role": "user", "content": [image]}],
        "result": [
            USER,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }
    async with seeing() as engine, messaging(engine) as client:
        whole = await client.messages.create(
            model="a", messages=chats[at], max_tokens=4
        )
        n_encoded = engine.stats().encodes
        source["data"] = "?"
        broken = {"model": "a", "messages": chats[at], "max_tokens": 4}
        if at == "user":  # who says it now can send another one
            with pytest.raises(anthropic.BadRequestError, match="no base64"):
                await client.messages.create(**broken)
        else:
            again = await client.messages.create(**broken)
            source["data"] = base64.b64encode(b"\x89PNG").decode()
            more = await client.messages.create(**broken)
            assert (again.type, more.type) == ("message", "message")

    assert (whole.type, n_encoded) == ("message", 1)
