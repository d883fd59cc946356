"""Sessions of agents whose history has what a server of a text model does not know."""

import json
from typing import Any

import pytest

from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.messages import MessagesBody
from pyllama_raw.serve.messages import read as read_messages
from pyllama_raw.serve.openai import ChatBody, read_chat
from pyllama_raw.serve.responses import ResponsesBody
from pyllama_raw.serve.responses import read as read_responses
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.serve.support import chatting, client_of, request_of

pytestmark = pytest.mark.anyio

N_TURNS = 10
# Prints tools and calls, and takes a system message at the beginning only.
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- endif -%}
<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor -%}
{%- endfor -%}
{% if add_generation_prompt %}<assistant>{% endif %}"""
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
PNG = "iVBORw0KGgo="


def odd_engine():
    limits = fake_limits(n_ctx_slot=2**15, n_cells=2**17, n_batch=2**15)
    return chatting(FakeExecutor(limits), chat_template=TEMPLATE)


def claude_code() -> list[dict[str, Any]]:
    """Bodies of `/v1/messages`, a turn each."""
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    # What the result of the call of a turn has, beside texts.
    results: list[Any] = [
        [{"type": "tool_reference", "tool_name": "mcp__files__read"}],
        [{"type": "text", "text": "seen"}, {"type": "image", "source": source}],
        [{"type": "document", "source": pdf, "title": "plan.pdf"}],
        [{"type": "image", "source": {"type": "file", "file_id": "file_1"}}],
        [],
        "plain text",
        None,
        [{"type": "thing_of_tomorrow"}],
    ]
    # What an earlier server put into its answers.
    answers: list[Any] = [
        {
            "type": "server_tool_use",
            "id": "srvtoolu_1",
            "name": "web_search",
            "input": {},
        },
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {
            "type": "mcp_tool_use",
            "id": "mcptoolu_1",
            "name": "find",
            "server_name": "s",
        },
        {"type": "redacted_thinking", "data": "x"},
        {"type": "container_upload", "file_id": "file_1"},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "<system-reminder>context</system-reminder>"},
        {"role": "system", "content": "Skills: none."},
    ]
    bodies = []
    for turn in range(N_TURNS):
        said = [{"type": "text", "text": f"Go on: {turn}."}]
        if turn:
            result = {"type": "tool_result", "tool_use_id": f"toolu_{turn - 1}"}
            content = results[(turn - 1) % len(results)]
            said.insert(0, result | ({} if content is None else {"content": content}))
        messages.append({"role": "user", "content": said})
        if turn % 3 == 2:
            messages.append(
                {"role": "system", "content": [{"type": "text", "text": "Now plan."}]}
            )
        bodies.append({
            "max_tokens": 2,
            "system": [{"type": "text", "text": "You are an agent."}],
            "messages": [*messages],
            "tools": [
                {"name": "Bash", "input_schema": SCHEMA, "defer_loading": True},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
                {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
            ],
        })  # fmt: skip
        use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash", "input": {}}
        written = [{"type": "text", "text": "So."}, answers[turn % len(answers)], use]
        messages.append({"role": "assistant", "content": written})
    return bodies


def codex() -> list[dict[str, Any]]:
    """Bodies of `/v1/responses`, a turn each, behind one that only tries the model."""

    def said(role: str, text: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "role": role, "content": content}

    function = {"type": "function", "name": "extra", "parameters": SCHEMA}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
    # What stands between the turns, by an earlier server or for one.
    between: list[list[dict[str, Any]]] = [
        [{"type": "web_search_call", "id": "ws_1", "status": "completed"}],
        [
            {"type": "local_shell_call", "call_id": "ls_1", "action": {"type": "exec"}},
            {"type": "local_shell_call_output", "id": "ls_1", "output": "{}"},
        ],
        [{"type": "reasoning", "summary": [], "encrypted_content": "x"}],
        [
            {
                "type": "custom_tool_call",
                "call_id": "p",
                "name": "apply_patch",
                "input": "*",
            },
            {"type": "custom_tool_call_output", "call_id": "p", "output": "ok"},
        ],
        [{"type": "compaction", "encrypted_content": "x"}],
        [{"type": "item_reference", "id": "msg_1"}],
        [{"type": "mcp_list_tools", "server_label": "s", "tools": []}],
        [{"type": "thing_of_tomorrow"}],
        [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_audio"}],
            }
        ],
    ]
    items: list[dict[str, Any]] = [
        {"type": "additional_tools", "role": "developer", "tools": [function]},
        said("developer", "Be brief."),
        said("user", "<environment_context></environment_context>"),
    ]
    bodies: list[dict[str, Any]] = [{"input": [], "max_output_tokens": 1}]
    for turn in range(N_TURNS):
        items.append(said("user", f"Go on: {turn}."))
        bodies.append({
            "instructions": "You are an agent.",
            "input": [*items],
            "max_output_tokens": 2,
            "tools": [
                {"type": "function", "name": "shell", "parameters": SCHEMA},
                {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
                {"type": "namespace", "name": "files", "tools": [function]},
                *({"type": kind} for kind in ("web_search", "local_shell", "mcp")),
            ],
        })  # fmt: skip
        call = {"type": "function_call", "call_id": f"call_{turn}", "name": "shell"}
        told = {"type": "function_call_output", "call_id": f"call_{turn}"}
        items += [
            *between[turn % len(between)],
            call | {"arguments": "{}"},
            told | {"output": [image] if turn % 2 else "done"},
        ]
        if turn % 3 == 2:
            items.append(said("developer", "Now plan."))
    return bodies


async def statuses(path: str, bodies: list[dict[str, Any]]) -> tuple[list[Any], str]:
    """What is not 200 of the answers to *bodies*, and the metrics of the service."""
    async with odd_engine() as engine:
        async with client_of(make_app({"a": engine}, ServeConfig())) as client:
            answers = [await client.post(path, json=body) for body in bodies]
            metrics = (await client.get("/metrics")).text
    return [a.json() for a in answers if a.status_code != 200], metrics


@pytest.mark.parametrize(
    ("path", "session"), [("/v1/messages", claude_code), ("/v1/responses", codex)]
)
async def test_no_turn_of_an_agent_is_refused(path, session):
    """
    Whatever its history has; what was left out and what was changed is counted.
    """
    refused, metrics = await statuses(path, session())

    assert refused == []
    for name in (
        'pyllama_raw:http_left_out_total{kind="other"}',
        "pyllama_raw:mended_chats",
    ):
        assert name in metrics


USER = {"role": "user", "content": "Hi"}
ODD = {"type": "thing_of_tomorrow"}
NO = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, ODD]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER, NO, USER], "max_tokens": 2}),
        ("/v1/responses", {"input": [USER, NO, USER], "max_output_tokens": 2}),
        ("/v1/responses", {"instructions": "Say hello.", "max_output_tokens": 2}),
        ("/v1/responses", {"input": None, "max_output_tokens": 2}),
    ],
)
async def test_a_refusal_and_an_absent_input_are_understood(path, body):
    """
    OpenAI's API leaves out `input`, and has refusals among the parts of a message.
    """
    refused, _ = await statuses(path, [body])

    assert refused == []


def turns(*history: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, *history, USER]


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


FLAT_CALL = {"type": "function_call", "call_id": "1", "name": None, "arguments": [1]}
NESTED_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TEXTLESS = {"type": "text", "text": None}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            ("/v1/chat/completions", {"messages": turns(message)})
            for message in (
                {"role": "tool", "content": {"ok": True}},
                {"role": "tool", "content": [{"rows": 1}, "two"]},
                {"role": "tool", "content": 5},
                assistant([TEXTLESS]),
            )
        ),
        *(
            ("/v1/messages", {"messages": turns(assistant(content), *results)})
            for content, *results in (
                (None,),
                ([TEXTLESS],),
                ([{"type": "text", "text": "a", "cache_control": "ephemeral"}],),
                ([{"type": "tool_use", "id": 5, "name": None, "input": {}}],),
                ([{"type": "tool_use", "id": "1", "name": "f", "input": [1]}],),
                (
                    "a",
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "content": {"type": "text", "text": "a"}},
                            {"type": "tool_result", "content": 5},
                        ],
                    },
                ),
            )
        ),
        ("/v1/responses", {"input": turns(FLAT_CALL, {"type": None, **USER})}),
        ("/v1/responses", {"input": "a", "tools": [NESTED_TOOL]}),
        *(
            ("/v1/chat/completions", {"messages": [USER], "tools": [NESTED_TOOL], **fields})
            for fields in (
                {"tool_choice": {"type": "auto"}},
                {"stream_options": {"include_usage": None}},
            )
        ),
    ],
)  # fmt: skip
async def test_what_agents_write_loosely_is_understood(path, body):
    """
    Results of tools that are no text, calls and texts of nothing, and fields of neighbours.
    """
    length = "max_output_tokens" if "responses" in path else "max_tokens"

    failures, _ = await statuses(path, [{**body, length: 2}])

    assert failures == []


async def test_a_new_text_without_a_text_has_its_place():
    """
    Not the error of the template, which has all messages in it.
    """
    body = {"messages": [USER, {"role": "user", "content": [TEXTLESS]}]}

    (failure,), _ = await statuses("/v1/chat/completions", [body])

    assert failure["error"]["message"] == "messages[1].content[0].text: give text"


async def test_clients_of_functions_are_served():
    """
    As OpenAI's API had them before tools; a result that names none is told what to give.
    """
    call = {"role": "assistant", "content": None, "function_call": {"name": "shell"}}
    result = {"role": "function", "name": "shell", "content": "done"}
    nameless = {"role": "function", "content": "done"}
    bodies = [
        {"messages": [USER, call, m], "max_tokens": 2} for m in (result, nameless)
    ]

    (failure,), _ = await statuses("/v1/chat/completions", bodies)

    assert failure["error"]["param"] == "messages[2].name"
    assert "role 'tool'" in failure["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/messages",
            {"messages": [USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": [ODD]}]},
            "messages[2].content[0]",
        ),
        (
            "/v1/responses",
            {"input": [USER, {"role": "user", "content": [ODD]}]},
            "input[1].content[0]",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "user", "content": [ODD]}]},
            "messages[1].content[0]",
        ),
    ],
)  # fmt: skip
async def test_what_the_user_says_now_is_refused(path, body, param):
    """
    Because the user can say something else.
    """
    (failure,), _ = await statuses(path, [body | {"max_tokens": 2}])

    assert failure["error"]["param"] == param


async def test_a_short_text_stands_for_what_is_not_known():
    """
    It has the kind, and the name if there is one.
    """
    reference = {"type": "tool_reference", "tool_name": "T"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [reference]}
    use = {"type": "server_tool_use", "name": "web_search"}
    messages = [
        USER,
        {"role": "assistant", "content": [use, {"type": "tool_use", "id": "1", "name": "f"}]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    items = [USER, {"type": "web_search_call"}, ODD, USER]

    body = MessagesBody(messages=messages)
    of_messages, _ = await request_of(read_messages, body)
    of_items, left_out = await request_of(read_responses, ResponsesBody(input=items))

    assert [m["content"] for m in of_messages.prompts[0]] == [
        "Hi", "[server_tool_use: web_search]", "[tool_reference: T]",
    ]  # fmt: skip
    assert [(m["role"], m["content"]) for m in of_items.prompts[0]] == [
        ("user", "Hi"),
        ("assistant", "[web_search_call]"),
        ("user", "[thing_of_tomorrow]"),
        ("user", "Hi"),
    ]
    assert left_out == {"web_search_call": 1, "other": 1}


async def test_answers_of_other_servers_stay_in_a_chat():
    """
    A refusal is a text, and a call of a custom tool is one of a function with one argument.
    """
    custom = {"name": "patch", "input": "+ x"}
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not"}]},
        USER,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": 5}, ODD]},
        USER,
        {"role": "assistant", "content": None, "refusal": "Not that", "audio": None},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"type": "custom", "id": "1", "custom": custom}]},
        {"role": "tool", "tool_call_id": "1", "content": None},
        USER,
    ]  # fmt: skip
    async with odd_engine() as engine:
        app = make_app({"a": engine}, ServeConfig())
        async with client_of(app) as client:
            told = await client.post("/apply-template", json={"messages": messages})
            body = {"messages": messages, "max_tokens": 2}
            answer = await client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    prompt = told.json()["prompt"]
    for part in (
        "<assistant>I will not<",
        "<assistant>Not that<",
        "[refusal]",
        "[thing_of_tomorrow]",
        '"input": "+ x"',
    ):
        assert part in prompt


async def prompts_of(path: str, *bodies: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The messages that the engine gets of *bodies*, which are taken."""
    model, read = READERS[path]
    requests = [await request_of(read, model(**body)) for body in bodies]
    return [list(request.prompts[0]) for request, _ in requests]


READERS: dict[str, Any] = {
    "/v1/chat/completions": (ChatBody, read_chat),
    "/v1/messages": (MessagesBody, read_messages),
    "/v1/responses": (ResponsesBody, read_responses),
}


def calling(*calls: Any, content: Any = None) -> list[dict[str, Any]]:
    return [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [*calls]},
        USER,
    ]


def call_of(name: Any = "f", arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "1", "type": "function", "function": function, **fields}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (call_of(id=7), call_of(id="7")),
        (call_of(id=[7], index=0, extra_content={"google": {}}), call_of(id=None)),
        (call_of(arguments=[1]), call_of(arguments="[1]")),
        ({"name": "f", "arguments": "{}", "id": "1"}, call_of()),
        (
            {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}},
            call_of(arguments={"input": "x"}),
        ),
    ],
)
async def test_a_call_of_a_chat_is_put_right(call, expected):
    """
    Ids that are no text, arguments of any kind, and fields that no template prints.
    """
    [messages] = await prompts_of("/v1/chat/completions", {"messages": calling(call)})

    assert messages[1]["tool_calls"] == [expected]


@pytest.mark.parametrize(
    "call",
    ["f", call_of(name=None), call_of(name=""), {"id": "1", "function": None}],
)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "[call]"),
        ("So.", "So.\n[call]"),
        (
            [{"type": "text", "text": "So."}],
            [{"type": "text", "text": "So."}, {"type": "text", "text": "[call]"}],
        ),
    ],
)
async def test_a_short_text_stands_for_a_call_of_a_chat_without_a_name(
    call, content, expected
):
    """
    Beside what the assistant says and calls, because clients send it again each time.
    """
    body = {"messages": calling(call, call_of(), content=content)}

    [messages] = await prompts_of("/v1/chat/completions", body)

    assert messages[1]["content"] == expected
    assert messages[1]["tool_calls"] == [call_of()]


OBJECTS = [{"type": "file", "name": "a"}, {"type": "dir", "name": "b"}]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (["a", "b"], '["a", "b"]'),
        ([{"rows": 1}], '[{"rows": 1}]'),
        ({"type": "error", "message": "no"}, '{"type": "error", "message": "no"}'),
        (5, "5"),
        ({"type": "text", "text": "a"}, "a"),
        ([{"type": "text", "text": "a"}], "a"),
    ],
)
async def test_the_result_of_a_tool_is_json_if_it_has_no_parts(result, expected):
    """
    In each dialect, and nothing of it is lost.
    """
    chat = [*calling(call_of())[:2], tool_said(result)]
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    block = {"type": "tool_result", "tool_use_id": "1", "content": result}
    messages = [USER, assistant([use]), {"role": "user", "content": [block]}]
    called = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": result}

    prompts = [
        *await prompts_of("/v1/chat/completions", {"messages": chat}),
        *await prompts_of("/v1/messages", {"messages": messages}),
        *await prompts_of("/v1/responses", {"input": [USER, called, output]}),
    ]

    for messages in prompts:
        texts = (expected, [{"type": "text", "text": expected}])
        assert messages[2]["content"] in texts


async def test_objects_of_a_result_that_have_a_type_are_no_parts_of_a_chat():
    """
    A list of files is what the tool says.
    """
    chat = [*calling(call_of())[:2], tool_said(OBJECTS)]

    [messages] = await prompts_of("/v1/chat/completions", {"messages": chat})

    assert messages[2]["content"] == json.dumps(OBJECTS)


def tool_said(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": content}


async def test_texts_of_a_chat_have_the_names_of_other_dialects():
    """
    Thoughts among them are no content.
    """
    content = [{"type": "input_text", "text": "a"}, "b"]
    thoughts = [{"type": "text", "text": "H"}, {"type": "text", "text": "m."}]
    written = [
        {"type": "thinking", "thinking": thoughts},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "output_text", "text": "c", "annotations": []},
    ]
    chat = [{"role": "user", "content": content}, assistant(written), USER]

    [messages] = await prompts_of("/v1/chat/completions", {"messages": chat})

    texts = [{"type": "text", "text": text} for text in "ab"]
    answer = {"type": "text", "text": "c", "annotations": []}
    assert messages[0]["content"] == texts
    assert messages[1] == assistant([answer]) | {"reasoning_content": "Hm."}


@pytest.mark.parametrize("content", ["", None, [], " \n"])
async def test_an_answer_that_is_begun_with_nothing_has_not_begun(content):
    """
    The prompt asks for an answer, as without that message.
    """
    bodies = [{"messages": [USER, assistant(content)]}, {"messages": [USER]}]
    async with odd_engine() as engine:
        app = make_app({"a": engine}, ServeConfig())
        async with client_of(app) as client:
            answers = [
                await client.post("/apply-template", json=body) for body in bodies
            ]

    assert answers[0].json() == answers[1].json() == {"prompt": "<user>Hi<assistant>"}


async def test_functions_among_items_join_the_tools():
    """
    And the model is told of them.
    """
    function = {"type": "function", "name": "extra", "parameters": SCHEMA}
    given = {"type": "additional_tools", "tools": [function, {"type": "custom"}]}
    body = ResponsesBody(input=[given, USER])

    request, left_out = await request_of(read_responses, body)

    (tool,) = request.options["tools"]
    assert tool["function"]["name"] == "extra"
    assert left_out == {"custom": 1}


async def test_a_role_that_no_template_knows_has_its_place():
    """
    That of its message, not of all.
    """
    odd = {"role": "critic", "content": "No."}

    (of_chat,), _ = await statuses("/v1/chat/completions", [{"messages": [USER, odd]}])
    (of_items,), _ = await statuses("/v1/responses", [{"input": [USER, odd]}])

    assert of_chat["error"]["param"] == "messages[1].role"
    assert of_items["error"]["param"] == "input[1]"
    assert "role 'critic' is not supported here" in of_items["error"]["message"]


async def test_a_role_that_stays_refused_is_said_in_the_words_that_agents_look_for():
    """
    They go on without such messages then; the parameter is the message.
    """
    never = "{{ raise_exception('never') if messages | length > 1 }}{{ messages[0].content }}"
    late = [
        USER,
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    async with chatting(chat_template=never) as engine:
        async with client_of(make_app({"a": engine})) as client:
            answer = await client.post(
                "/v1/messages", json={"max_tokens": 2, "system": "a", "messages": late}
            )

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[1]")
    assert "role 'system' is not supported here" in error["message"]


async def test_mistakes_of_unions_say_all_that_fits():
    """
    A field that may be a text or a list says both.
    """
    (failure,), _ = await statuses("/v1/responses", [{"input": 5}])

    assert failure["error"]["message"] == "input: give text, or a list"
