"""Both protocols, spoken by a server that answers with what a test gives it."""

import json

import pytest

from pyllama_raw.lab.calls import Call, attempt
from pyllama_raw.lab.targets import (
    API_KEY,
    first_model,
    http_target,
    open_client,
    target_of,
)
from tests.lab.bench.raw_server import chunked, serving, sized

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
]

USAGE = {"prompt_tokens": 9, "completion_tokens": 3}


def sse(*events):
    return (
        "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]"
    )


async def ask(call, answer, protocol="openai", forbidden=(), piece=7):
    """The record of *call*, and the server that gave *answer*."""
    async with serving(answer, piece) as server, open_client(server.url, {}) as client:
        target = await target_of(client, protocol, forbidden)
        return await attempt(target, call), server


def chunk(text, **fields):
    return {"choices": [{"index": 0, "text": text, **fields}]}


async def test_the_key_of_the_environment_is_sent(monkeypatch):
    """
    With every request, as servers of OpenAI's protocol want it.
    """
    monkeypatch.setenv(API_KEY, "key")
    async with serving(sized("")) as server:
        async with http_target(server.url, "openai") as target:
            await attempt(target, Call("x", 1))

    assert [a.headers["authorization"] for a in server.requests] == ["bearer key"] * 2


async def test_openai_counts_what_the_usage_says():
    """
    A chunk may hold two tokens; the last one may hold none. Usage brings the counts.
    """
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    last = chunk("", finish_reason="length") | {"usage": USAGE | details}
    body = sse(chunk("a"), chunk("b c"), last)
    record, server = await ask(Call([1, 2], 3), chunked(body), forbidden=[2])

    assert record.error is None
    assert (record.text, len(record.times), record.n_output) == ("ab c", 2, 3)
    assert (record.n_prompt, record.n_cached, record.queue_s) == (9, 4, None)
    path, _, body = server.requests[-1]
    assert path == "/v1/completions"
    assert body["prompt"] == [1, 2]
    assert (body["max_tokens"], body["ignore_eos"]) == (3, True)
    assert body["logit_bias"] == {"2": -100}


async def test_openai_without_usage_counts_chunks():
    """
    As of servers that know no stream_options; cached tokens stay unknown.
    """
    body = sse(chunk("a"), chunk(""), chunk("", finish_reason="length"))
    record, _ = await ask(Call("x", 2), chunked(body))

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
    record, server = await ask(Call("x", 3), chunked(body), "llama-server")

    assert (record.error, record.tokens, record.text) == (None, [5, 6, 7], "abc")
    assert (record.n_cached, record.n_prompt) == (2, 5)
    (request,) = server.requests
    assert (request.path, request.body["n_predict"]) == ("/completion", 3)


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
    record, _ = await ask(Call("x", 2), sized(body, status))

    assert record.error is not None
    assert message in record.error


async def test_a_lost_connection_is_a_failure():
    """
    It does not end the run.
    """
    record, _ = await ask(Call("x", 2), chunked(sse(chunk("a")))[:-9])

    assert record.error is not None
    assert record.error.startswith(
        "CallFailed: HttpFailed: RemoteProtocolError peer closed"
    )


async def test_who_has_enough_leaves():
    """
    While the server still sends.
    """
    body = sse(chunk("a"), chunk("b"), chunk("c"))
    record, _ = await ask(Call("x", 3, leave_after=2), chunked(body))

    assert (record.error, record.left, record.text) == (None, True, "ab")


async def test_who_leaves_is_not_told_of_later_errors():
    """
    An error that follows the last token it wanted is no failure of the call.
    """
    body = sse(chunk("a"), chunk("b")) + "\nerror: gone\n"
    record, _ = await ask(Call("x", 3, leave_after=1), sized(body), piece=1000)

    assert (record.error, record.left, record.text) == (None, True, "a")


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
    async with serving(sized(body, status)) as server:
        async with open_client(server.url, {}) as client:
            assert await first_model(client) == name

    assert [request.path for request in server.requests] == ["/v1/models"]
