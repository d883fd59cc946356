"""Bodies that are too large, too slow, or none."""

import gzip
import json
from threading import get_ident

import anyio
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from pyllama_raw.serve import (
    ServeConfig,
    make_app,
    messages,
    openai,
    reading,
    responses,
)
from pyllama_raw.serve.body import Body
from pyllama_raw.serve.failures import Failure, words_of
from pyllama_raw.serve.keys import VARIABLE
from pyllama_raw.serve.reading import INLINE, MAX_DEPTH, check_values
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.engine.support import HeldSteps
from tests.serve.support import LIMIT_S, chatting, client_of, serving
from tests.serve.wire import chat, wire
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio

MANY = 8 * 2**20


async def test_a_large_body_is_refused_by_its_head(anyio_backend_name):
    """
    8 MiB and one byte: nothing of it is read, and the connection is closed.
    """
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.begin(content_length=str(MANY + 1))
                    status, headers, told = await client.answer()
                    assert await client.rest() == b""

    assert (status, headers["connection"]) == (413, "close")
    assert told["error"]["code"] == "body_too_large"
    assert str(MANY) in told["error"]["message"]


async def test_a_refusal_reaches_who_still_sends(anyio_backend_name, monkeypatch):
    """
    A body of 5 MB is let go by, so that no reset of the connection overtakes the answer.
    """
    monkeypatch.setenv(VARIABLE, "sk-1")
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.post(b" " * (5 * 2**20), connection="close")
                    status, *_ = await client.answer()
                    assert await client.rest() == b""

    assert status == 401


async def test_a_body_of_unknown_length_is_counted(anyio_backend_name):
    """
    It is refused as soon as it has too much, long before its end.
    """
    config = ServeConfig(max_body_bytes=1000)
    part = b"100\r\n" + b" " * 256 + b"\r\n"
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            app = make_app({"a": engine}, config)
            async with serving(app, anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.begin(transfer_encoding="chunked")
                    for _ in range(4):
                        await client.send(part)
                    status, _, told = await client.answer()
                async with wire(url) as client:
                    await client.post(chat(max_tokens=2, stream=False))
                    other, *_ = await client.answer()

    assert (status, told["error"]["code"]) == (413, "body_too_large")
    assert other == 200


async def test_a_slow_body_is_not_waited_for(anyio_backend_name):
    """
    408, and meanwhile it takes no place from others.
    """
    config = ServeConfig(body_s=0.2)
    with anyio.fail_after(LIMIT_S):
        async with chatting(max_waiting=0) as engine:
            app = make_app({"a": engine}, config)
            async with serving(app, anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.begin(content_length="100")
                    await client.send(b"{")
                    status, headers, told = await client.answer()

    assert (status, headers["connection"]) == (408, "close")
    assert told["error"]["code"] == "body_timeout"
    assert app.state.service.n_open == 0


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b"{", b"\xff\xff", b"null", b'"\xe4"', b"[" * 100_000, b"9" * 5000],
        b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
async def test_what_is_no_chat_is_refused(body, anyio_backend_name):
    """
    With 400, however it is broken; the connection goes on.
    """
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.post(body)
                    status, _, told = await client.answer()
                    await client.post(chat(max_tokens=2, stream=False))
                    other, *_ = await client.answer()

    assert (status, told["error"]["type"]) == (400, "invalid_request_error")
    assert other == 200


def test_what_fits_no_branch_is_told_without_our_classes():
    """
    A body knows none of them, and its mistakes come without them.
    """

    class Options(BaseModel):
        scale: float

    with pytest.raises(ValidationError) as raised:
        TypeAdapter(Options | str).validate_python(5)

    words = words_of(raised.value.errors(include_context=False))
    assert words == "give a mapping of its options, or text"


@pytest.mark.parametrize(
    ("path", "field", "function"),
    [
        ("/v1/chat/completions/input_tokens", "messages", (openai, "_read_chat")),
        ("/v1/messages/count_tokens", "messages", (messages, "_read")),
        ("/v1/responses/input_tokens", "input", (responses, "_read")),
    ],
)
async def test_the_parts_of_a_large_body_are_no_work_of_the_loop(
    path, field, function, anyio_backend_name, monkeypatch
):
    """
    A worker looks at each of many messages; those of a small body are not worth one.
    """
    read, threads = getattr(*function), []

    def read_and_note(*arguments):
        threads.append(get_ident())
        return read(*arguments)

    monkeypatch.setattr(*function, read_and_note)
    message = {"role": "user", "content": "a"}
    bodies = [
        json.dumps({field: [message] * n}).encode() for n in (1, INLINE // 30, 9_000)
    ]
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    answers = []
                    for body in bodies:
                        await client.post(body, path)
                        answers.append(await client.answer())

    assert [thread == get_ident() for thread in threads] == [True, False, False]
    (small, *_), (large, *_), (status, _, told) = answers
    assert (small, large, status) == (200, 200, 400)
    assert told["error"]["message"].endswith("give at most 8192 messages")


async def test_memory_is_given_back_after_the_last_large_body(
    anyio_backend_name, monkeypatch
):
    """
    Once for bodies that were in work together, and not for small ones.
    """
    trims, steps = [], HeldSteps()
    monkeypatch.setattr(reading, "trim", lambda: trims.append(get_ident()))
    executor = FakeExecutor(fake_limits(), on_step=steps)
    large = chat(max_tokens=2, stream=False, user="a" * 2 * INLINE)
    counts = []
    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine:
            app = make_app({"a": engine})
            async with serving(app, anyio_backend_name) as url:
                async with wire(url) as first, wire(url) as other:
                    for n_open, client in enumerate((first, other), 1):
                        await client.post(large)
                        while app.state.service.n_open < n_open:
                            await anyio.lowlevel.checkpoint()
                    steps.allow(1000)
                    for client in (first, other):
                        counts.append(len(trims))
                        await client.answer()
                    while not trims:
                        await anyio.lowlevel.checkpoint()
                    await first.post(chat(max_tokens=2, stream=False))
                    status, *_ = await first.answer()

    assert (counts[0], len(trims), status) == (0, 1, 200)
    assert trims[0] != get_ident()


def models_of(model):
    for one in model.__subclasses__():
        yield one
        yield from models_of(one)


def slow_parts(schema, path=""):
    """Lists and mappings within *schema* that go on after a mistake."""
    if isinstance(schema, dict):
        kind, values = schema.get("type"), schema.get("values_schema", {"type": "any"})
        is_free = (
            kind == "dict" and values["type"] == "any"
        )  # nothing in it is a mistake
        is_short = kind == "tuple" and schema.get("variadic_item_index") is None
        is_fine = schema.get("fail_fast") or is_free or is_short
        if kind in ("list", "set", "frozenset", "tuple", "dict") and not is_fine:
            yield path
        for name, value in schema.items():
            if name not in ("metadata", "serialization"):
                yield from slow_parts(value, f"{path}.{name}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from slow_parts(value, f"{path}[{index}]")


def test_lists_of_all_bodies_stop_at_their_first_mistake():
    """
    Or a body of a MiB makes a million errors, of which one is told.
    """
    models = {*models_of(Body)}
    slow = {
        f"{model.__name__}{path}"
        for model in models
        for path in slow_parts(model.__pydantic_core_schema__)
    }

    assert len(models) > 10
    assert slow == set()


@pytest.mark.parametrize("model", sorted({*models_of(Body)}, key=str))
def test_a_field_that_is_null_is_as_if_left_out(model):
    """
    In all bodies, because clients and llama-server read it so.
    """
    fields = model.model_fields.items()
    optional = {name for name, field in fields if not field.is_required()}
    refused = set()
    for name in optional & {*model.kinds_of}:
        try:
            model.model_validate({name: None})
        except ValidationError as error:
            refused |= {name for item in error.errors() if name in item["loc"]}

    assert refused == set()


@pytest.mark.parametrize(
    ("body", "n_values"),
    [
        (b"[1, 2, 3]", 3),
        (b'{"a": [1, 2], "b": {}}', 5),
        (b'["a,b,c", "d\\",[[[,", "e\\\\"]', 3),
        (b'{"a": "[[[{{{,,,"}', 1),
    ],
)
def test_values_are_counted_before_they_are_parsed(body, n_values):
    """
    What stands within texts is none; escapes of quotes are understood.
    """
    check_values(body, n_values)
    with pytest.raises(Failure, match=f"at most {n_values - 1} values"):
        check_values(body, n_values - 1)


@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_body_is_not_nested_deep(pair):
    """
    Brackets within texts do not count.
    """
    opens, closes = pair
    texts = b'["' + b"[" * 1000 + b'"]'
    check_values(opens * (MAX_DEPTH - 1) + texts + closes * (MAX_DEPTH - 1), 2000)
    with pytest.raises(Failure, match=f"at most {MAX_DEPTH} levels"):
        check_values(opens * (MAX_DEPTH + 1) + b"1" + closes * (MAX_DEPTH + 1), 2000)


MANY_WORDS = [["w", 1.0]] * 1001


@pytest.mark.parametrize(
    ("path", "fields", "param", "limit"),
    [
        ("/completion", {"prompt": ["a"] * 521}, "prompt", "520"),
        ("/completion", {"prompt": ["a"] * 6, "n_cmpl": 100}, "prompt", "520"),
        ("/v1/completions", {"prompt": ["a"] * 521}, "prompt", "520"),
        ("/completion", {"prompt": [[1, *["a"] * 2049]]}, "prompt", "2048"),
        (
            "/completion",
            {"prompt": "a", "logit_bias": MANY_WORDS},
            "logit_bias",
            "1000",
        ),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "2048"),
        ("/tokenize", {"content": "a", "x": [1] * 300_001}, "body", "300000"),
        (
            "/completion",
            {"prompt": "a", "response_fields": ["a"] * 257},
            "response_fields",
            "256",
        ),
        (
            "/v1/score",
            {"query": "a" * 2**20, "items": ["b"] * 400, "label_token_ids": [5]},
            "items",
            "8388608",
        ),
        (
            "/v1/score",
            {"query": [1] * 99, "items": [[2]] * 2049, "label_token_ids": [5]},
            "label_token_ids",
            "2048",
        ),
        (
            "/completion",
            {"prompt": "a", "t_max_predict_ms": 10**400},
            "t_max_predict_ms",
            "2147483647",
        ),
        ("/completion", {"prompt": "a", "n_indent": 10**400}, "n_indent", "2147483647"),
        (
            "/v1/responses",
            {"input": "a", "metadata": {"a": "b" * 2**14}},
            "body",
            "16384",
        ),
    ],
)
async def test_a_body_cannot_ask_for_too_much(
    path, fields, param, limit, anyio_backend_name
):
    """
    The refusal names the field and the limit.
    """
    with anyio.fail_after(LIMIT_S):
        async with chatting(FakeExecutor(fake_limits(n_slots=8))) as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.post(json.dumps(fields).encode(), path)
                    status, _, told = await client.answer()

    assert (status, told["error"]["param"]) == (400, param)
    assert limit in told["error"]["message"]


async def test_bodies_that_come_at_the_end_are_refused(anyio_backend_name):
    """
    503 at once, and no error of the server.
    """
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            app = make_app({"a": engine})
            async with serving(app, anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.begin(content_length="100")
                    await client.send(b"{")
                    while not app.state.service.traffic.in_flight:
                        await anyio.lowlevel.checkpoint()
                    app.state.service.drain()
                    status, headers, told = await client.answer()

    assert (status, told["error"]["code"]) == (503, "server_is_draining")
    assert headers["connection"] == "close"


async def test_a_body_that_is_packed_is_refused_by_its_header(anyio_backend_name):
    """
    415, and not by a mistake in its JSON.
    """
    body = gzip.compress(chat())
    async with chatting() as engine:
        async with serving(make_app({"a": engine}), anyio_backend_name) as url:
            async with wire(url) as client:
                await client.post(body, content_encoding="gzip")
                status, _, answer = await client.answer()

    assert (status, answer["error"]["param"]) == (415, "body")
    assert "content-encoding" in answer["error"]["message"]


async def test_half_a_pair_of_characters_comes_back_as_a_mark(anyio_backend_name):
    """
    An error that repeats a name of the body, or a part of it, is an answer like others.
    """
    name = "\ud800stream"
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with wire(url) as client:
                    await client.post(chat(**{name: True}))
                    status, _, told = await client.answer()

    assert (status, told["error"]["param"]) == (400, "\ufffdstream")


@pytest.mark.parametrize("escaped", [True, False])
async def test_half_a_pair_of_characters_in_a_text_is_a_mark(escaped):
    """
    Programs that cut texts leave such halves, and send them again with each request; whole pairs stay.
    """
    messages = [{"role": "user", "content": "a \ud83d \U0001f600"}]
    content = json.dumps({"messages": messages}, ensure_ascii=escaped)
    async with chatting() as engine:
        async with client_of(make_app({"a": engine})) as client:
            answer = await client.post(
                "/apply-template",
                content=content.encode(errors="surrogatepass"),
                headers={"content-type": "application/json"},
            )

    assert (answer.status_code, answer.json()) == (
        200,
        {"prompt": "a \ufffd \U0001f600"},
    )
