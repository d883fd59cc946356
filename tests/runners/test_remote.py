"""A service over HTTP: what it is asked, and what its answers become."""

import json

import httpx2
import pytest

from pyllama_raw import FinishReason, SamplingParams, Usage
from pyllama_raw.errors import (
    ConfigError,
    Unsupported,
)
from pyllama_raw.runners import (
    LLAMA_SERVER,
    OPENAI,
    PYLLAMA,
    Prices,
    RemoteRunner,
    connection,
)
from pyllama_raw.runners.errors import (
    NetworkError,
    UnexpectedAnswer,
)
from tests.runners.stub import (
    CHAT,
    DONE,
    Stub,
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

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


async def test_only_what_is_set_is_sent():
    """
    What is not set is the service's business, an explicit zero overrides it (M19).
    """
    runner = runner_of(honest)
    await answer_of(runner)
    await answer_of(
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
        await answer_of(runner, CHAT, params, tools=[TOOL], tool_choice="f")
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
    await answer_of(llama, params=SamplingParams(top_k=5))

    assert stub_of(runner).requests == []
    assert stub_of(llama).bodies[0]["top_k"] == 5


async def test_an_address_is_one_of_http():
    """
    /v1 may be left out; a model and a key are in no repr.
    """
    with pytest.raises(ConfigError, match="give http"):
        RemoteRunner("localhost:80", "m")
    for url in ("http://a", "http://a/", "http://a/v1", "http://a/v1/"):
        runner = RemoteRunner(url, "m", api_key="secret", transport=Stub(honest))
        await answer_of(runner)
        [(path, _, headers)] = stub_of(runner).requests
        assert path == "/v1/completions"
        assert headers["authorization"] == "Bearer secret"
        assert "secret" not in repr(runner)


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
    result = await answer_of(runner_of(stream(*frames)), CHAT)

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
    result = await answer_of(runner_of(stream(*parts)))

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
        await answer_of(runner_of(stream(*[line] * 20)))


async def test_our_own_reason_comes_back():
    """
    A deadline that passed is no length.
    """
    frame = chunk("a", "length", x_finish="deadline")
    result = await answer_of(runner_of(stream(frame, DONE)))

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
    assert len(stub_of(runner).requests) == 1


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
        await answer_of(runner)

    assert len(stub_of(runner).requests) == 1


async def test_a_service_without_health_is_asked_for_its_models():
    """
    As OpenAI's own has none.
    """
    paths = []

    def answer(request):
        paths.append(request.url.path)
        return httpx2.Response(404 if "health" in paths[-1] else 200)

    async with RemoteRunner(
        "http://a", "m", transport=httpx2.MockTransport(answer)
    ) as r:
        health = await r.health()

    assert (health.ready, paths) == (True, ["/health", "/v1/models"])


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
        ranks = await runner.rank("a", ["b", "c"])

    [(path, body, _)] = stub_of(runner).requests
    assert (path, body["documents"]) == ("/v1/rerank", ["b", "c"])
    assert [(rank.index, rank.score) for rank in ranks] == [(1, 2.0), (0, -1.0)]


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


async def test_a_seed_that_nobody_sent_is_not_told():
    """
    Who asks again with it would get another text; a seed that was sent counts the outputs.
    """
    unsent = await answer_of(runner_of(honest))
    runner = runner_of(honest)
    async with runner:
        results = await runner.generate("a", SamplingParams(seed=5, n=2)).collect_all()

    assert unsent.seed is None
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
