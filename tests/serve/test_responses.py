"""The dialect of responses, by OpenAI's client, which is strict."""

import httpx
import openai
import pytest

from pyllama_raw.serve import make_app
from pyllama_raw.serve.responses import ResponsesBody, read
from tests.serve.agent_clients import items_of, joined_response, response_events
from tests.serve.clients import talking
from tests.serve.support import chatting, request_of
from tests.support.limits import LIMIT_S
from tests.support.replying import TOOL, reply_engine, tokens_of

pytestmark = pytest.mark.anyio

FUNCTION = {"type": "function", "strict": False} | TOOL["function"]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Öl"}}\n</tool_call>'
REPLY = f"<think>\nHm, rain.\n</think>\n\nLet me see.{CALL}{CALL}"
ITEMS = [
    ("reasoning", "", "Hm, rain."),
    ("message", "", "Let me see."),
    ("function_call", "weather", '{"city": "Öl"}'),
    ("function_call", "weather", '{"city": "Öl"}'),
]
SAID = {"role": "user", "content": "Rain?"}
OF_OURS = f"msg_{'0' * 36}"
OTHERS = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]


@pytest.fixture
def anyio_backend():
    return "asyncio"  # that of the client


async def test_a_response_is_made_of_items_whole_and_streamed():
    """
    Thoughts, text and each call are an item of their own; tools of other kinds are left out.
    """
    asked = {"input": "Rain?", "tools": [FUNCTION, *OTHERS]}
    async with reply_engine(REPLY) as engine, talking(engine) as client:
        whole = await client.responses.create(model="a", **asked)
        events = await response_events(client, **asked)

    last = events[-1].response
    assert items_of(whole) == joined_response(events) == items_of(last) == ITEMS
    assert whole.status == last.status == "completed"
    assert whole.usage == last.usage
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert [tool.name for tool in whole.tools] == ["weather"]


async def test_events_of_a_response_have_an_order():
    """
    They are counted, each item is there from its beginning to its end, and all of them in the last event.
    """
    asked = {"input": "Rain?", "tools": [FUNCTION]}
    async with reply_engine(REPLY) as engine, talking(engine) as client:
        events = await response_events(client, **asked)

    kinds = [event.type.removeprefix("response.") for event in events]
    order = [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]
    called = [f"function_call_arguments.{part}" for part in ("delta", "done")]

    def text(kind):
        return [
            *("output_item.added", "content_part.added", f"{kind}.delta"),
            *(f"{kind}.done", "content_part.done", "output_item.done"),
        ]

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert order == [
        *("created", "in_progress", *text("reasoning_text"), *text("output_text")),
        *("output_item.added", *called, "output_item.done") * 2,
        "completed",
    ]
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert done == events[-1].response.output


async def test_a_response_that_was_cut_is_incomplete():
    """
    And says why.
    """
    asked = {"input": "Rain?", "max_output_tokens": 3}
    async with reply_engine("Let me see.") as engine, talking(engine) as client:
        whole = await client.responses.create(model="a", **asked)
        events = await response_events(client, **asked)

    assert events[-1].type == "response.incomplete"
    assert whole.status == whole.output[0].status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert items_of(whole) == items_of(events[-1].response)


async def test_items_stand_where_the_model_wrote_them():
    """
    Also in a answer answer; a call behind which the text was cut is answer.
    """
    reply = f"{CALL}Then this and that."
    n_tokens = len(tokens_of(CALL)) + 4
    body = {"input": "Rain?", "tools": [FUNCTION], "max_output_tokens": n_tokens}
    async with reply_engine(reply) as engine, talking(engine) as client:
        answer = await client.responses.create(model="a", **body)
        events = await response_events(client, **body)

    last = events[-1].response
    assert items_of(answer) == items_of(last)
    assert [(item.type, item.status) for item in answer.output] == [
        ("function_call", "completed"),
        ("message", "incomplete"),
    ]
    statuses = [item.status for item in answer.output]
    assert statuses == [item.status for item in last.output]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]"),
        (
            {"input": [SAID, {"type": "item_reference", "id": OF_OURS}, SAID]},
            "input[1]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
async def test_what_is_not_done_is_refused(fields, param):
    """
    With the field at fault.
    """
    asked = {"input": "Rain?", "tools": [FUNCTION]} | fields
    async with reply_engine(REPLY) as engine:
        transport = httpx.ASGITransport(make_app({"a": engine}))
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://here",
            timeout=LIMIT_S,
        ) as client:
            answer = await client.post("/v1/responses", json=asked)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_nothing_is_kept():
    """
    There is no response to be had later, and what asks for hidden thoughts gets none.
    """
    asked = {"input": "Rain?", "store": True}
    asked["include"] = ["reasoning.encrypted_content"]
    async with reply_engine("Yes.") as engine, talking(engine) as client:
        whole = await client.responses.create(model="a", **asked)
        for ask in (client.responses.retrieve, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(whole.id)

    assert (whole.output_text, whole.store) == ("Yes.", False)


async def test_items_become_the_messages_of_a_template():
    """
    What an assistant thinks, says and calls in a turn is one message.
    """
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought["content"] = [{"type": "reasoning_text", "text": "Hm."}]
    calls = [
        {"type": "function_call", "call_id": i, "name": "weather", "arguments": "{}"}
        for i in "12"
    ]
    results = [
        {"type": "function_call_output", "call_id": i, "output": "sun"} for i in "12"
    ]
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I see."}]}
    body = ResponsesBody(
        instructions="Be kind.",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
            *(thought, said, *calls, *results, thought, said),
            {"role": "user", "content": "And now?"},
        ],
    )
    request, _ = await request_of(read, body)

    function = {"name": "weather", "arguments": "{}"}
    assert request.prompts[0] == [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "I see.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": i, "type": "function", "function": function} for i in "12"
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "tool", "content": "sun", "tool_call_id": "2"},
        {"role": "assistant", "content": "I see.", "reasoning_content": "Hm."},
        {"role": "user", "content": "And now?"},
    ]
    assert request.origins[:3] == ["instructions", "input[0]", "input[1]"]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, "auto"),
        ("required", "required"),
        ({"type": "function", "name": "weather"}, "weather"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "required",
        ),
    ],
)
async def test_choices_of_functions_are_those_of_the_engine(choice, wanted):
    """
    With those functions only that are allowed.
    """
    tools = [FUNCTION, FUNCTION | {"name": "other"}]
    body = ResponsesBody(input="a", tools=tools, tool_choice=choice)
    request, _ = await request_of(read, body)
    options = request.options

    n_tools = 1 if isinstance(choice, dict) and "tools" in choice else 2
    found = options.get("tool_choice", "auto")
    assert (found, len(options["tools"])) == (wanted, n_tools)


async def test_tokens_of_an_input_are_counted():
    """
    Without an answer.
    """
    async with chatting() as engine, talking(engine, strict=False) as client:
        told = await client.responses.input_tokens.count(model="a", input="four")
        n_expected = await engine.count([{"role": "user", "content": "four"}])

    assert told.input_tokens == n_expected
