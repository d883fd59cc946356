"""What no service or caller should send: typed errors, within limits of memory and time."""

import json

import anyio
import anyio.lowlevel
import httpx2
import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.errors import (
    ConfigError,
    InvalidRequest,
    PyllamaError,
)
from pyllama_raw.runners import PYLLAMA, Backoff, RemoteRunner, connection, remote
from pyllama_raw.runners.errors import (
    RemoteRefused,
    ServerError,
    UnexpectedAnswer,
)
from tests.runners.stub import (
    CHAT,
    answer_of,
    chunk,
    event,
    honest,
    runner_of,
    said,
    stream,
    stub_of,
)
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


def of_chat(**delta) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]})


def of_call(**call) -> bytes:
    return of_chat(tool_calls=[call])


def entry(**fields) -> bytes:
    listed = {"content": [{"token": "a", "logprob": -1.0} | fields]}
    return event({"choices": [{"index": 0, "delta": {}, "logprobs": listed}]})


@pytest.mark.parametrize(
    "frame",
    [
        of_chat(content=5),
        of_chat(reasoning_content=5),
        of_chat(reasoning=["a"]),
        of_call(index=0, id="1", function={"name": "f", "arguments": {"a": 1}}),
        of_call(index=0, id=["1"], function={"name": "f"}),
        of_call(index=0, id="1", function={"name": 5}),
        of_call(index=-1, id="1", function={"name": "f"}),
        of_call(index=2**40, id="1", function={"name": "f"}),
        entry(token=5),
        entry(bytes=10**14),
        entry(bytes=[256]),
        entry(logprob="x"),
        chunk("a", index=1),
        chunk("a", reason=5),
        event({"usage": {"prompt_tokens": -1}}),
        event({"usage": {"prompt_tokens": 2**70}}),
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: " + b"9" * 5000 + b"\n\n",
    ],
)
async def test_what_is_of_another_type_is_no_answer(frame):
    """
    Texts, counts, indices and bytes are what they should be; nothing of Python comes out.
    """
    with pytest.raises(UnexpectedAnswer):
        await answer_of(runner_of(stream(frame, *said("a"))), CHAT)


async def test_half_a_character_is_a_mark():
    """
    A text that is read can be written again.
    """
    frame = b'data: {"choices": [{"index": 0, "text": "\\ud83d\\ude00 \\ud800"}]}\n\n'
    result = await answer_of(runner_of(stream(frame, *said(""))))

    assert result.text == "\U0001f600 \ufffd"


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (400, b"[" * 100_000, RemoteRefused),
        (400, b"9" * 5000, RemoteRefused),
        (400, b'{"error": {"code": ["x"], "param": {"a": 1}}}', RemoteRefused),
        (400, b'{"error": {"n_prompt_tokens": true, "n_ctx": -5}}', RemoteRefused),
        (500, b"\xff" * 100, ServerError),
        (500, b'{"error":' * 50_000, ServerError),
        (503, b'{"error": {"type": ["x"]}}', ServerError),
    ],
)
async def test_an_error_of_any_shape_has_its_status(status, content, kind):
    """
    However deep, long or strange its body is.
    """
    runner = runner_of(httpx2.Response(status, content=content))
    with pytest.raises(kind) as caught:
        await answer_of(runner)

    assert caught.value.status == status


class Endless(httpx2.AsyncByteStream):
    """A mebibyte again and again; `n_read` of them were read."""

    def __init__(self, part: bytes) -> None:
        self._part, self.n_read = part, 0

    async def __aiter__(self):
        while True:
            self.n_read += 1
            await anyio.lowlevel.checkpoint()  # as a socket does
            yield self._part


@pytest.mark.parametrize("verb", ["error", "embed", "stream"])
async def test_no_answer_fills_the_memory(verb, monkeypatch):
    """
    Bodies of errors, whole answers and streams are read up to a limit.
    """
    monkeypatch.setattr(remote, "MAX_STREAM", 2**20)
    part = chunk("a" * 2**18) if verb == "stream" else b" " * 2**20
    body, kind = Endless(part), {"content-type": "text/event-stream"}
    status = 500 if verb == "error" else 200
    answer = httpx2.Response(status, stream=body, headers=kind)
    runner = runner_of(answer, backoff=Backoff(max_retries=0))

    async def ask():
        if verb == "embed":
            return await runner.embed(["a"])
        return await runner.generate("a", SamplingParams(max_tokens=1)).collect()

    async with runner:
        with pytest.raises(PyllamaError) as caught:
            await ask()

    assert isinstance(caught.value, ServerError if status == 500 else UnexpectedAnswer)
    assert body.n_read < 20


async def test_a_coding_that_hides_gigabytes_is_not_read():
    """
    Only those whose content cannot be a million times as long.
    """
    headers = {"content-encoding": "zstd", "content-type": "text/event-stream"}
    with pytest.raises(UnexpectedAnswer, match="zstd"):
        await answer_of(
            runner_of(httpx2.Response(500, stream=Endless(b"a"), headers=headers))
        )


@pytest.mark.parametrize(
    "data",
    [
        [{"index": 0, "embedding": [1.0]}],
        [{"index": i, "embedding": [1.0] * (i + 1)} for i in range(2)],
        [{"index": i, "embedding": "ab"} for i in range(2)],
        [{"index": i, "embedding": [float("nan")]} for i in range(2)],
        [{"index": str(i), "embedding": [1.0]} for i in range(2)],
        {"a": 1},
    ],
)
async def test_vectors_are_a_row_of_numbers_for_each_text(data):
    """
    Anything else is no answer.
    """
    content = json.dumps({"data": data}).encode()
    with pytest.raises(UnexpectedAnswer):
        await runner_of(httpx2.Response(200, content=content)).embed(["a", "b"])


@pytest.mark.parametrize(
    "rows", [[(0, float("nan")), (1, 1.0)], [(0, 2.0), (0, 1.0)], [(2, 1.0)]]
)
async def test_ranks_are_a_number_for_a_document(rows):
    """
    What is no number has no place in an order, and no document has two.
    """
    results = [{"index": i, "relevance_score": score} for i, score in rows]
    content = json.dumps({"results": results}).encode()
    response = httpx2.Response(200, content=content)
    with pytest.raises(UnexpectedAnswer):
        await runner_of(response, dialect=PYLLAMA).rank("a", ["b", "c"])


CIRCLE: list = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        ("\ud800", {}, "prompt"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages"),
        ([{"role": "user", "content": "a", "x": CIRCLE}], {}, "messages"),
        ([{"role": "user", "content": "a", "x": object()}], {}, "messages"),
        (CHAT, {"template_kwargs": {"x": float("nan")}}, "chat_template_kwargs"),
        (CHAT, {"tools": [CIRCLE]}, "tools"),
    ],
)
async def test_what_json_cannot_hold_is_refused_by_name(prompt, options, name):
    """
    Before anything is sent.
    """
    runner = runner_of(honest, dialect=PYLLAMA)
    with pytest.raises(InvalidRequest, match="JSON can hold") as caught:
        await answer_of(runner, prompt, **options)

    assert caught.value.name == name
    assert stub_of(runner).requests == []


@pytest.mark.parametrize("url", ["http://[", "http://a:b", "http://a..b", 5, "http://"])
async def test_an_address_of_any_shape_is_refused(url):
    """
    With what would be one.
    """
    with pytest.raises(ConfigError, match="http://HOST:PORT/v1"):
        RemoteRunner(url, "m")
    with pytest.raises(ConfigError, match="ASCII"):
        RemoteRunner("http://a", "m", api_key="a\nb")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("9" * 400, 120.0),
        ("7200", 120.0),
        ("7", 7.0),
        ("-5", None),
        ("Wed, 21 Oct 2015 07:28:00 +" + "9" * 40, None),
        ("Wed, 21 Oct " + "9" * 30 + " 07:28:00 GMT", None),
        ("Wed, 21 Oct 9999 07:28:00 GMT", 120.0),
    ],
)
async def test_a_wait_that_a_service_asks_for_is_bounded(header, seconds):
    """
    Two minutes at most, however it is written.
    """
    assert connection.retry_after_s(header) == seconds
