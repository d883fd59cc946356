"""A service over HTTP: words, answers, errors, and what is never done twice."""

import json

import anyio
import anyio.lowlevel
import httpx2
import pytest

from pyllama_raw import FinishReason, SamplingParams, Usage
from pyllama_raw.errors import (
    ConfigError,
    InvalidRequest,
    PromptTooLong,
    PyllamaError,
    Unsupported,
)
from pyllama_raw.runners import (
    LLAMA_SERVER,
    OPENAI,
    PYLLAMA,
    Backoff,
    Breaker,
    Prices,
    RebuildCause,
    RemoteRunner,
    RunnerCounts,
    Timeouts,
    connection,
    remote,
)
from pyllama_raw.runners.errors import (
    AuthFailed,
    CircuitOpen,
    ContentFiltered,
    NetworkError,
    RateLimited,
    RemoteRefused,
    RunnerTimeout,
    ServerError,
    UnexpectedAnswer,
)
from tests.loops import anyio_backend  # noqa: F401
from tests.runners.stub import DONE, Stub, chunk, event, honest, refusal, said, stream

pytestmark = pytest.mark.anyio

AT_ONCE = Backoff(first_s=0.0)
CHAT = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def runner_of(*replies, **options) -> RemoteRunner:
    options = {"backoff": AT_ONCE} | options
    return RemoteRunner("http://a", "m", transport=Stub(*replies), **options)


def stub_of(runner: RemoteRunner) -> Stub:
    return runner._client._transport


async def told(runner: RemoteRunner, prompt="a", params=None, **options):
    async with runner:
        return await runner.generate(prompt, params, **options).collect()


# -- words --------------------------------------------------------------------


async def test_only_what_is_set_is_sent():
    """
    What is not set is the service's business, an explicit zero overrides it (M19).
    """
    runner = runner_of(honest)
    await told(runner)
    await told(
        runner := runner_of(honest), params=SamplingParams(temperature=0, seed=0, n=1)
    )

    assert stub_of(runner).bodies == [
        {
            "model": "m",
            "prompt": "a",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "seed": 0,
            "n": 1,
        }
    ]


async def test_each_dialect_has_its_words():
    """
    The limit of tokens of chats, lists of likely tokens, tools and schemas.
    """
    params = SamplingParams(
        max_tokens=3,
        logprobs=2,
        stop=("x",),
        logit_bias={5: 1.0},
        json_schema={"const": 1},
    )
    bodies = []
    for dialect in (OPENAI, PYLLAMA):
        runner = runner_of(honest, dialect=dialect)
        await told(runner, CHAT, params, tools=[TOOL], tool_choice="f")
        bodies += stub_of(runner).bodies

    for body in bodies:
        assert body["top_logprobs"] == 2
        assert body["logprobs"] is True
        assert body["logit_bias"] == {"5": 1.0}
        assert body["stop"] == ["x"]
        assert body["tools"] == [TOOL]
        assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
        assert body["response_format"]["json_schema"]["schema"] == {"const": 1}
        assert body["messages"] == CHAT
    assert bodies[0]["max_completion_tokens"] == bodies[1]["max_tokens"] == 3


async def test_what_a_dialect_has_no_word_for_is_not_sent():
    """
    It is refused, because it would change the output.
    """
    runner = runner_of(honest)
    with pytest.raises(Unsupported, match="top_k"):
        runner.generate("a", SamplingParams(top_k=5))
    with pytest.raises(Unsupported, match="deadline_s"):
        runner.generate("a", deadline_s=5)
    llama = runner_of(honest, dialect=LLAMA_SERVER)
    await told(llama, params=SamplingParams(top_k=5))

    assert stub_of(runner).asked == []
    assert stub_of(llama).bodies[0]["top_k"] == 5


async def test_an_address_is_one_of_http():
    """
    /v1 may be left out; a model and a key are in no repr.
    """
    with pytest.raises(ConfigError, match="give http"):
        RemoteRunner("localhost:80", "m")
    for url in ("http://a", "http://a/", "http://a/v1", "http://a/v1/"):
        runner = RemoteRunner(url, "m", api_key="secret", transport=Stub(honest))
        await told(runner)
        [(path, _, headers)] = stub_of(runner).asked
        assert path == "/v1/completions"
        assert headers["authorization"] == "Bearer secret"
        assert "secret" not in repr(runner)


# -- answers ------------------------------------------------------------------


async def test_reasoning_and_calls_are_parts():
    """
    Under either name of reasoning; counts of all kinds of tokens are told.
    """
    deltas = [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Hm"},
        {"reasoning": "m."},
        {"content": "Well"},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
    ]
    frames = [event({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    end = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {"reasoning_tokens": 6},
    }
    frames += [event({"choices": [end]}), event({"choices": [], "usage": usage}), DONE]
    result = await told(runner_of(stream(*frames)), CHAT)

    [call] = result.tool_calls
    assert (result.reasoning, result.text) == ("Hmm.", "Well")
    assert (call.id, call.name, call.arguments) == ("1", "f", "{}")
    assert result.finish_reason is FinishReason.STOP
    assert result.usage == Usage(9, 8, 7, reasoning_tokens=6)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("n", [1, 2, 3, 1000])
async def test_every_split_of_a_stream_gives_the_same_text(end, n):
    """
    Whatever ends lines; comments and other fields are no text, and U+2028 ends no line.
    """
    choice = {"index": 0, "text": "ü\u2028"}
    first = json.dumps({"choices": [choice]}, ensure_ascii=False).encode()
    frames = [b": a comment\nretry: 1\n\n", b"data:%b\n\n" % first, *said("b")]
    received = b"".join(frames).replace(b"\n", end)
    parts = [received[at : at + n] for at in range(0, len(received), n)]
    result = await told(runner_of(stream(*parts)))

    assert result.text == "ü\u2028b"


@pytest.mark.parametrize("line", [b"data: aaaaaaaa", b"data: aaaaaaaa\n"])
@pytest.mark.filterwarnings(  # httpx2 leaves generators behind where it refuses an event
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
async def test_an_event_without_an_end_does_not_fill_the_memory(line, monkeypatch):
    """
    In one line and in many.
    """
    monkeypatch.setattr(connection, "MAX_EVENT_BYTES", 100)

    with pytest.raises(UnexpectedAnswer, match="100 byte"):
        await told(runner_of(stream(*[line] * 20)))


async def test_our_own_reason_comes_back():
    """
    A deadline that passed is no length.
    """
    frame = chunk("a", "length", x_finish="deadline")
    result = await told(runner_of(stream(frame, DONE)))

    assert result.finish_reason is FinishReason.DEADLINE


@pytest.mark.parametrize(
    "frames",
    [
        [chunk("a")],
        [chunk("a"), b"data: {"],
        [chunk("a"), httpx2.ReadError("gone")],
        [chunk("a"), DONE],
    ],
)
async def test_a_stream_that_breaks_off_is_no_whole_answer(frames):
    """
    Its end without a reason is an error, and the text before it was read.
    """
    runner = runner_of(stream(*frames))
    async with runner, runner.generate("a") as run:
        first = await anext(run)
        with pytest.raises(NetworkError):
            await anext(run)

    assert first.text == "a"
    assert len(stub_of(runner).asked) == 1


@pytest.mark.parametrize(
    "frame",
    [
        b"data: no JSON\n\n",
        b"data: 5\n\n",
        event({"choices": [5]}),
        b'data: {"usage": {"prompt_tokens": 1e999}}\n\n',
        b"data: " + b"[" * 100000 + b"\n\n",
    ],
    ids=range(5),
)
async def test_what_no_api_has_is_named_so(frame):
    """
    It is the service's fault, and no second try would help.
    """
    runner = runner_of(stream(frame))
    with pytest.raises(UnexpectedAnswer):
        await told(runner)

    assert len(stub_of(runner).asked) == 1


# -- errors -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "kind", "n_tries"),
    [
        (refusal(400), RemoteRefused, 1),
        (refusal(401), AuthFailed, 1),
        (refusal(403), RemoteRefused, 1),
        (refusal(404), RemoteRefused, 1),
        (refusal(408), ServerError, 4),
        (refusal(409), ServerError, 4),
        (refusal(429), RateLimited, 4),
        (refusal(500), ServerError, 4),
        (refusal(503), ServerError, 4),
        (refusal(503, code="server_is_overloaded"), RateLimited, 4),
        (refusal(302), UnexpectedAnswer, 1),
        (refusal(400, code="unsupported", param="model"), Unsupported, 1),
        (refusal(400, n_prompt_tokens=200, n_ctx=128), PromptTooLong, 1),
        (httpx2.Response(502, text="<html>bad gateway"), ServerError, 4),
        (httpx2.ConnectError("refused"), NetworkError, 4),
        (httpx2.ConnectTimeout("late"), RunnerTimeout, 4),
        (lambda _: stream(event({"error": {"code": 500}})), ServerError, 4),
        (httpx2.Response(200, text="no stream"), UnexpectedAnswer, 1),
    ],
    ids=range(18),
)
async def test_a_status_is_an_error_of_ours(reply, kind, n_tries):
    """
    What may pass is tried again, three times; the rest once.
    """
    runner = runner_of(reply)
    with pytest.raises(kind):
        await told(runner)

    assert len(stub_of(runner).asked) == n_tries


async def test_an_error_within_a_stream_has_the_status_of_its_type():
    """
    After the first delta nothing is asked again.
    """
    failed = event({"error": {"message": "slow", "type": "rate_limit_error"}})
    runner = runner_of(stream(chunk("a"), failed))
    with pytest.raises(RateLimited):
        await told(runner)

    assert len(stub_of(runner).asked) == 1


async def test_withheld_text_is_an_error_that_is_final():
    """
    Another try would be withheld, too.
    """
    runner = runner_of(stream(chunk("a", "content_filter"), DONE))
    with pytest.raises(ContentFiltered):
        await told(runner)

    assert len(stub_of(runner).asked) == 1


async def test_a_try_after_a_failure_gives_one_text():
    """
    Whatever failed first: no connection, load, or a stream without a token.
    """
    runner = runner_of(
        httpx2.ConnectError("no"), refusal(503), stream(DONE), stream(*said("a", "b"))
    )
    result = await told(runner)

    assert (result.text, len(stub_of(runner).asked)) == ("ab", 4)


async def test_two_faults_open_the_breaker():
    """
    The third request is not sent, and the runner is not ready.
    """
    runner = runner_of(refusal(503), backoff=Backoff(max_retries=0), breaker=Breaker(2))
    async with runner:
        kinds = []
        for _ in range(3):
            try:
                await runner.generate("a").collect()
            except (ServerError, CircuitOpen) as error:
                kinds.append(type(error))
        health = await runner.health()

    assert kinds == [ServerError, ServerError, CircuitOpen]
    assert len(stub_of(runner).asked) == 2
    assert (health.live, health.ready) == (True, False)


async def test_another_key_is_for_new_requests():
    """
    Those under way keep the old one.
    """
    goes_on = anyio.Event()
    held = stream(chunk("a"), goes_on.wait, *said("b"))
    runner = runner_of(held, stream(*said("c")), api_key="old")
    async with runner, runner.generate("a") as run:
        await anext(run)
        await runner.rebuild("new")
        new = await runner.generate("a").collect()
        goes_on.set()
        result = await run.collect()

    keys = [headers["authorization"] for _, _, headers in stub_of(runner).asked]
    assert keys == ["Bearer old", "Bearer new"]
    assert (result.text, new.text) == ("ab", "c")


async def test_a_service_that_hangs_has_a_limit():
    """
    Before the first token, which is tried again, and after it, which is not.
    """
    for first, what, n_tries in (
        ([], "first_token", 2),
        ([chunk("a")], "between_tokens", 1),
    ):
        stalled = [stream(*first, anyio.sleep_forever) for _ in range(2)]
        limits = Timeouts(first_token_s=0.05, between_tokens_s=0.05)
        backoff = Backoff(first_s=0, max_retries=1)
        runner = runner_of(*stalled, timeouts=limits, backoff=backoff)
        with pytest.raises(RunnerTimeout) as caught:
            await told(runner)

        assert (caught.value.what, len(stub_of(runner).asked)) == (what, n_tries)


async def test_health_has_a_short_limit_of_its_own():
    """
    A service that does not answer is not live, and nobody waits for long.
    """

    class Silent(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request):
            await anyio.sleep_forever()

    limits = Timeouts(health_s=0.01)
    async with RemoteRunner("http://a", "m", timeouts=limits, transport=Silent()) as r:
        health = await r.health()

    assert (health.live, health.ready) == (False, False)
    assert health.detail == "no answer within 0.01 s"


@pytest.mark.parametrize(
    ("status", "live", "ready"),
    [(200, True, True), (503, True, False), (500, False, False)],
)
async def test_health_is_what_the_service_says(status, live, ready):
    """
    One that loads or drains lives, and takes nothing.
    """
    answers = httpx2.MockTransport(lambda _: httpx2.Response(status))
    async with RemoteRunner("http://a", "m", transport=answers) as runner:
        health = await runner.health()

    assert (health.live, health.ready) == (live, ready)


async def test_a_service_without_health_is_asked_for_its_models():
    """
    As OpenAI's own has none.
    """
    asked = []

    def answer(request):
        asked.append(request.url.path)
        return httpx2.Response(404 if "health" in asked[-1] else 200)

    async with RemoteRunner(
        "http://a", "m", transport=httpx2.MockTransport(answer)
    ) as r:
        health = await r.health()

    assert (health.ready, asked) == (True, ["/health", "/v1/models"])


async def test_ranks_come_best_first():
    """
    In the words of servers that rank.
    """
    results = [
        {"index": 0, "relevance_score": -1.0},
        {"index": 1, "relevance_score": 2.0},
    ]
    answer = httpx2.Response(200, json={"results": results})
    async with runner_of(answer, dialect=PYLLAMA) as runner:
        found = await runner.rank("a", ["b", "c"])

    [(path, body, _)] = stub_of(runner).asked
    assert (path, body["documents"]) == ("/v1/rerank", ["b", "c"])
    assert [(one.index, one.score) for one in found] == [(1, 2.0), (0, -1.0)]


async def test_prices_make_a_cost():
    """
    None without prices.
    """
    usage = Usage(10**6, 10**6, 0)
    async with runner_of(honest, prices=Prices(1.0, 2.0)) as priced:
        cost = priced.cost(usage)
    async with runner_of(honest) as free:
        unknown = free.cost(usage)

    assert cost is not None
    assert (cost.usd, unknown) == (3.0, None)
    assert json.dumps(cost.usd) == "3.0"


# -- what is wrong on either side ---------------------------------------------


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
        await told(runner_of(stream(frame, *said("a"))), CHAT)


async def test_half_a_character_is_a_mark():
    """
    A text that is read can be written again.
    """
    frame = b'data: {"choices": [{"index": 0, "text": "\\ud83d\\ude00 \\ud800"}]}\n\n'
    result = await told(runner_of(stream(frame, *said(""))))

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
        await told(runner)

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
        await told(
            runner_of(httpx2.Response(500, stream=Endless(b"a"), headers=headers))
        )


@pytest.mark.parametrize(
    "data",
    [
        [{"index": 0, "embedding": [1.0]}],
        [{"index": i, "embedding": [1.0] * (i + 1)} for i in range(2)],
        [{"index": i, "embedding": "ab"} for i in range(2)],
        [{"index": i, "embedding": [float("nan")]} for i in range(2)],
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
        await told(runner, prompt, **options)

    assert caught.value.name == name
    assert stub_of(runner).asked == []


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


async def test_a_seed_that_nobody_sent_is_not_told():
    """
    Who asks again with it would get another text; a seed that was sent counts the outputs.
    """
    drawn = await told(runner_of(honest))
    given = runner_of(honest)
    async with given:
        results = await given.generate("a", SamplingParams(seed=5, n=2)).collect_all()

    assert drawn.seed is None
    assert [result.seed for result in results] == [5, 6]


async def test_pooling_goes_where_there_is_a_word_for_it():
    """
    Other services would make vectors of another kind without a word.
    """
    runner = runner_of(honest, dialect=PYLLAMA)
    await runner.embed(["a"], pooling="mean")
    with pytest.raises(Unsupported, match="pooling"):
        await runner_of(honest).embed(["a"], pooling="mean")

    assert stub_of(runner).bodies == [{"model": "m", "input": ["a"], "pooling": "mean"}]


async def test_beginning_anew_closes_the_breaker():
    """
    For causes of a service; a key that is not given stays.
    """
    runner = runner_of(
        refusal(500),
        honest,
        breaker=Breaker(1),
        api_key="k",
        backoff=Backoff(max_retries=0),
    )
    async with runner:
        with pytest.raises(ServerError):
            await runner.generate("a").collect()
        await runner.rebuild(cause=RebuildCause.CONFIG_CHANGED)
        result = await runner.generate("a").collect()
        with pytest.raises(Unsupported):
            await runner.rebuild(cause=RebuildCause.DEVICE_POISONED)

    assert result.text == "hello world"
    assert stub_of(runner).asked[-1][2]["authorization"] == "Bearer k"
    assert runner.counts == RunnerCounts(n_requests=2, n_failed=1)


async def test_tries_are_told_and_counted(caplog):
    """
    A line for each, with the reason.
    """
    runner = runner_of(refusal(500), honest)
    await told(runner)

    assert runner.counts == RunnerCounts(n_requests=1, n_retries=1)
    assert "m at a: try 1 failed, another one in 0.0 s: the server answered 500" in (
        caplog.text
    )
