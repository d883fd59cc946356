"""Both protocols, spoken by a server that is a function."""

import json

import httpx
import pytest

from pyllama_raw.bench.call import Call, attempt
from pyllama_raw.bench.http_target import (
    LlamaServerTarget,
    OpenAITarget,
    first_model,
)

pytestmark = pytest.mark.anyio

USAGE = {"prompt_tokens": 9, "completion_tokens": 3}


def sse(*events):
    return (
        "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]"
    )


async def in_pieces(body):
    """Cut anywhere, as a network does."""
    raw = body.encode()
    for start in range(0, len(raw), 7):
        yield raw[start : start + 7]


def client(body="", status=200, seen=None):
    def answer(request):
        if seen is not None:
            seen.append((request.url.path, json.loads(request.content)))
        return httpx.Response(status, content=in_pieces(body))

    transport = httpx.MockTransport(answer)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def chunk(text, **more):
    return {"choices": [{"index": 0, "text": text, **more}]}


async def test_openai_counts_what_the_usage_says():
    """
    A chunk may hold two tokens; the last one may hold none. Usage brings the counts.
    """
    seen = []
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    last = chunk("", finish_reason="length") | {"usage": USAGE | details}
    body = sse(chunk("a"), chunk("b c"), last | {"queue_s": 0.5})
    async with client(body, seen=seen) as http:
        record = await attempt(OpenAITarget(http, forbidden=[2]), Call([1, 2], 3))

    assert record.error is None
    assert (record.text, len(record.times), record.n_output) == ("ab c", 2, 3)
    assert (record.n_prompt, record.n_cached, record.queue_s) == (9, 4, 0.5)
    path, asked = seen[0]
    assert path == "/v1/completions"
    assert asked["prompt"] == [1, 2]
    assert (asked["max_tokens"], asked["ignore_eos"]) == (3, True)
    assert asked["logit_bias"] == {"2": -100}


async def test_openai_without_usage_counts_chunks():
    """
    As of servers that know no stream_options; cached tokens stay unknown.
    """
    body = sse(chunk("a"), chunk(""), chunk("", finish_reason="length"))
    async with client(body) as http:
        record = await attempt(OpenAITarget(http), Call("x", 2))

    assert (record.error, record.n_output, record.n_cached) == (None, 2, None)


async def test_llama_server_names_its_tokens():
    """
    Ids are kept, so that turns can be ids; timings bring the counts.
    """
    timings = {"cache_n": 2, "prompt_n": 3}
    body = sse(
        {"tokens": [5], "content": "a", "stop": False},
        {"tokens": [6, 7], "content": "bc", "stop": False},
        {"tokens": [], "content": "", "stop": True, "timings": timings},
    )
    async with client(body) as http:
        record = await attempt(LlamaServerTarget(http), Call("x", 3))

    assert (record.error, record.tokens, record.text) == (None, [5, 6, 7], "abc")
    assert (record.n_cached, record.n_prompt) == (2, 5)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("busy", 503, "status 503: busy"),
        (sse({"error": {"message": "no"}}), 200, "no"),
        ("error: gone\n", 200, "error: gone"),
        (sse(chunk("a")), 200, "1 tokens came, not 2"),
    ],
)
async def test_refusals_and_short_answers_are_failures(body, status, message):
    """
    An answer of another length than was asked for did other work.
    """
    async with client(body, status) as http:
        record = await attempt(OpenAITarget(http), Call("x", 2))

    assert record.error is not None
    assert message in record.error


async def test_a_lost_connection_is_a_failure():
    """
    It does not end the run.
    """

    def lose(request):
        raise httpx.ConnectError("refused")

    http = httpx.AsyncClient(transport=httpx.MockTransport(lose), base_url="http://s")
    async with http:
        record = await attempt(OpenAITarget(http), Call("x", 2))

    assert record.error == "CallFailed: ConnectError: refused"


@pytest.mark.parametrize(
    ("body", "status", "name"),
    [
        ('{"data": [{"id": "m"}, {"id": "n"}]}', 200, "m"),
        ('{"data": []}', 200, "default"),
        ("[]", 200, "default"),
        ("not here", 404, "default"),
        ("no json", 200, "default"),
    ],
)
async def test_the_first_model_of_a_server_is_asked_for(body, status, name):
    """
    Some servers refuse names they do not know; others list none.
    """

    def answer(request):
        assert request.url.path == "/v1/models"
        return httpx.Response(status, text=body)

    http = httpx.AsyncClient(
        transport=httpx.MockTransport(answer), base_url="http://server"
    )
    async with http:
        assert await first_model(http) == name
