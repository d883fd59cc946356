"""Forms of the answer beside thoughts and tools, and cut calls, in all dialects."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import make_app
from tests.support.replying import TEMPLATE, TOOL, reply_engine, reply_parts

pytest.importorskip("llguidance")

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "Rain?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FUNCTION = TOOL["function"]
PARAMETERS = FUNCTION["parameters"]
FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS}
NAMED = {"name": "weather", "input_schema": PARAMETERS}
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
ASKED = {
    CHATS: {"messages": [USER], "tools": [TOOL], "max_tokens": 99},
    RESPONSES: {"input": "Rain?", "tools": [FLAT], "max_output_tokens": 99},
    MESSAGES: {"messages": [USER], "tools": [NAMED], "max_tokens": 99},
}
FORMED = {
    CHATS: {"response_format": {"type": "json_schema", "json_schema": FORM}},
    RESPONSES: {"text": {"format": FORM}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
MUST = {
    CHATS: {"tool_choice": "required"},
    RESPONSES: {"tool_choice": "required"},
    MESSAGES: {"tool_choice": {"type": "any"}},
}
PATHS = [CHATS, RESPONSES, MESSAGES]
THINKS = TEMPLATE.replace("{% if thinks %}", "{% if enable_thinking is not false %}")
ANSWER = '{"a": true}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "'


def asking(engine: AsyncEngine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(make_app({"a": engine}))
    return httpx.AsyncClient(transport=transport, base_url="http://a")


def reason_of(path: str, answer: dict) -> tuple[str, str]:
    """The end of an answer, and the status of its last call."""
    if path == CHATS:
        return answer["choices"][0]["finish_reason"], ""
    if path == MESSAGES:
        return answer["stop_reason"], ""
    return answer["status"], answer["output"][-1]["status"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_form_comes_after_thoughts_and_beside_calls(path):
    """
    One grammar has thoughts, then a call or the answer; where a call is demanded, calls alone.
    """
    grammars: list[str | None] = []

    def make_rules(params, _):
        grammars.append(params.lark)

    parts = reply_parts(f"Hm.</think>\n\n{ANSWER}", template=THINKS)
    engine = AsyncEngine(replace(parts, make_rules=make_rules))
    async with engine, asking(engine) as client:
        body = ASKED[path] | FORMED[path]
        may = await client.post(path, json=body)
        must = await client.post(path, json=body | MUST[path])

    assert (may.status_code, must.status_code) == (200, 200)
    assert ANSWER in json.dumps(may.json()).replace('\\"', '"')
    free, called = grammars[0], grammars[-1]
    assert free
    assert called
    assert '"a": {"type": "boolean"}' in free
    assert '"city"' in free
    assert '"a": {"type": "boolean"}' not in called
    assert '"city"' in called


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (CHATS, ("stop", "")),
        (RESPONSES, ("completed", "incomplete")),
        (MESSAGES, ("end_turn", "")),
    ],
)
async def test_a_call_in_which_the_turn_ends_is_no_call_to_run(path, end):
    """
    The end of the answer does not say that there is one; a whole one does.
    """
    whole = {CHATS: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use"}
    async with reply_engine(CALL) as engine, asking(engine) as client:
        cut = await client.post(path, json=ASKED[path])
    async with reply_engine(CALL + '"}}') as engine, asking(engine) as client:
        ended = await client.post(path, json=ASKED[path])

    assert reason_of(path, cut.json()) == end
    assert reason_of(path, ended.json())[0] == whole[path]


@pytest.mark.parametrize("path", PATHS)
async def test_a_stop_string_does_not_cut_a_call(path):
    """
    It is looked for in the text for the reader.
    """
    stop = {MESSAGES: "stop_sequences"}.get(path, "stop")
    async with reply_engine(CALL + 'Par"}}') as engine, asking(engine) as client:
        answer = await client.post(path, json=ASKED[path] | {stop: ["Par"]})

    assert "Par" in answer.text
    whole = {CHATS: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use"}
    assert reason_of(path, answer.json())[0] == whole[path]
