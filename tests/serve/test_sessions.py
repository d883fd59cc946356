"""Sessions of agents on tiny models: what was read before is not computed again."""

import json
from itertools import pairwise, takewhile
from pathlib import Path

import jsonschema
import pytest

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig
from pyllama_raw.serve import messages, responses
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.messages import MessagesBody
from pyllama_raw.serve.responses import ResponsesBody
from pyllama_raw.serve.service import Service
from scripts.mutations import gguf_file
from scripts.tiny_models.gguf_values import encode
from tests.serve.agent_clients import (
    items_of,
    joined_message,
    joined_response,
    message_events,
    messaging,
    response_events,
)
from tests.serve.clients import talking
from tests.serve.sessions import claude_code, codex
from tests.serve.support import request_of
from tests.support.replying import TEMPLATE, TOOL
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]

LEAST = 0.95  # of what two prompts begin with


def with_template(model: Path, template: str, path: Path) -> Path:
    """Write *model* with another chat template to *path*."""
    file = gguf_file.read(model)
    file.values[b"tokenizer.chat_template"] = encode(template)
    path.write_bytes(file.encode())
    return path


@pytest.fixture
def anyio_backend():
    return "asyncio"  # that of the clients


def session_engine(tmp_path, name: str = "llama"):
    model = with_template(tiny_model(name), TEMPLATE, tmp_path / "model.gguf")
    context = ContextConfig(n_ctx=16384)
    return AsyncEngine.open(model, EngineConfig(context=context))


async def prompts_of(engine, bodies, dialect, kind):
    """The tokens of each prompt, and what they begin with that the one before has, too."""
    service = Service({"a": engine}, ServeConfig())
    prompts = []
    for body in bodies:
        given = {name: value for name, value in body.items() if name != "extra_body"}
        request = await dialect.read(kind(**given), service)
        prompts.append(await engine.tokenize(request.prompts[0], **request.of_chat))
    return [
        sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(a, b, strict=False)))
        for a, b in pairwise(prompts)
    ]


async def test_claude_code_reuses_what_it_said_before(tmp_path):
    """
    From the second turn on, although its bills and the status of git change.
    """
    cached = []
    async with session_engine(tmp_path) as engine, messaging(engine) as client:
        for body in claude_code():
            events = await message_events(client, **body)
            usage = events[-2].usage
            cached.append(usage.cache_read_input_tokens)
        common = await prompts_of(engine, claude_code(), messages, MessagesBody)

    shares = [n / of for n, of in zip(cached[1:], common, strict=True)]
    assert all(share >= LEAST for share in shares), shares
    assert min(common) > 500


async def test_codex_reuses_what_it_said_before(tmp_path):
    """
    From the second turn on.
    """
    cached = []
    async with session_engine(tmp_path) as engine, talking(engine) as client:
        for body in codex():
            whole = await client.responses.create(model="a", **body)
            cached.append(whole.usage.input_tokens_details.cached_tokens)
        common = await prompts_of(engine, codex(), responses, ResponsesBody)

    shares = [n / of for n, of in zip(cached[1:], common, strict=True)]
    assert all(share >= LEAST for share in shares), shares
    assert min(common) > 500


async def test_marks_are_points_where_memory_cannot_be_cut(tmp_path):
    """
    The ends of the system prompt and of the last message, in tokens; others need none.
    """
    body = next(claude_code())
    given = {name: value for name, value in body.items() if name != "extra_body"}
    found = {}
    for name in ("lfm2", "llama"):
        async with session_engine(tmp_path, name) as engine:
            service = Service({"a": engine}, ServeConfig())
            request = await messages.read(MessagesBody(**given), service)
            tokens = await engine.tokenize(request.prompts[0], **request.of_chat)
            points = request.options.get("cache_points", ())
            prefixes = [tokens[:point] for point in points]
            found[name] = [await engine.detokenize(p, special=True) for p in prefixes]

    ends = [text.rstrip().rpartition(">")[2] for text in found["lfm2"]]
    assert (ends, found["llama"]) == (["user", ""], [])
    assert found["lfm2"][1].rstrip().endswith("gitStatus: M file0.py<|im_end|>")


async def test_the_line_of_bills_is_a_constant():
    """
    Where it is the first of a block of the system prompt, and nowhere else.
    """
    first, second, *_ = list(claude_code())
    chats = []
    for body in (first, second):
        kept = MessagesBody(system=body["system"], messages=first["messages"])
        request, _ = await request_of(messages.read, kept)
        chats.append(request.prompts[0])

    assert chats[0] == chats[1]
    assert "cch=" not in str(chats[0])


async def test_streams_of_a_model_are_the_whole_answers(tmp_path):
    """
    At an equal seed, in both dialects.
    """
    said = [{"role": "user", "content": "say something of some length"}]
    sampled = {"seed": 3}
    async with session_engine(tmp_path) as engine:
        async with messaging(engine) as client:
            asked = {"messages": said, "max_tokens": 24, "extra_body": sampled}
            message = await client.messages.create(model="a", **asked)
            blocks = joined_message(await message_events(client, **asked))
        async with talking(engine) as client:
            asked = {"input": said, "max_output_tokens": 24, "extra_body": sampled}
            response = await client.responses.create(model="a", **asked)
            items = joined_response(await response_events(client, **asked))

    assert [("text", "", message.content[0].text)] == blocks
    assert items_of(response) == items == [("message", "", message.content[0].text)]


@pytest.mark.parametrize("seed", range(3))
async def test_calls_that_must_be_made_are_made(seed, tmp_path):
    """
    By name or at all, with arguments that fit the schema, in both dialects.
    """
    schema = TOOL["function"]["parameters"] | {"additionalProperties": False}
    schema = schema | {"properties": {"city": {"type": "string", "maxLength": 8}}}
    said = [{"role": "user", "content": "Rain?"}]
    # <tool_call>, as it would <think> for ever
    sampled = {"seed": seed, "logit_bias": {str(ord("o")): 100}}
    async with session_engine(tmp_path) as engine:
        async with messaging(engine) as client:
            message = await client.messages.create(
                model="a",
                messages=said,
                max_tokens=400,
                tools=[{"name": "weather", "input_schema": schema}],
                tool_choice={
                    "type": "tool",
                    "name": "weather",
                    "disable_parallel_tool_use": True,
                },
                extra_body=sampled,
            )
        async with talking(engine) as client:
            function = {"type": "function", "name": "weather", "parameters": schema}
            response = await client.responses.create(
                model="a",
                input=said,
                max_output_tokens=400,
                tools=[function | {"strict": True}],
                tool_choice="required",
                parallel_tool_calls=False,
                extra_body=sampled,
            )

    (block,), (item,) = message.content, response.output
    assert (message.stop_reason, response.status) == ("tool_use", "completed")
    assert (block.name, item.name) == ("weather", "weather")
    for arguments in (block.input, json.loads(item.arguments)):
        jsonschema.validate(arguments, schema)
