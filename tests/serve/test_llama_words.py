"""What clients of llama.cpp's server find here by its names."""

import gc
from datetime import datetime

import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.errors import ConfigError
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.llamacpp import NativeCompletionBody
from pyllama_raw.serve.openai import ChatBody, CompletionBody
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.serve.support import chatting
from tests.serve.test_gate import CHAT, PATH, asking, client_of
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_a_prompt_that_is_too_long_has_the_type_and_words_of_llama_server():
    """
    And OpenAI's code, with both numbers.
    """
    async with asking() as (app, client):
        n_ctx = app.state.service.engines["a"].n_ctx_slot
        asked = CHAT | {"messages": [{"role": "user", "content": "a" * 9 * n_ctx}]}
        answer = await client.post(PATH, json=asked)

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "exceeds the available context size" in error.pop("message")
    assert error == {
        "type": "exceed_context_size_error",
        "param": "messages",
        "code": "context_length_exceeded",
        "n_prompt_tokens": error["n_prompt_tokens"],
        "n_ctx": n_ctx,
    }
    assert error["n_prompt_tokens"] > n_ctx


async def test_the_tokens_of_a_chat_are_those_of_its_answer():
    """
    Counted without an answer.
    """
    async with asking() as (_, client):
        counted = await client.post(f"{PATH}/input_tokens", json=CHAT)
        answer = await client.post(PATH, json=CHAT)

    n_tokens = answer.json()["usage"]["prompt_tokens"]
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": n_tokens,
    }


@pytest.mark.parametrize(
    ("given", "n_output"),
    [({"n_predict": 3}, 3), ({"n_predict": 3, "max_tokens": 2}, 2)],
)
async def test_n_predict_is_max_tokens_of_a_completion(given, n_output):
    """
    Unless this is given, too.
    """
    asked = {"prompt": "a", "seed": 1, "ignore_eos": True} | given
    async with asking() as (_, client):
        answer = await client.post("/v1/completions", json=asked)

    assert answer.json()["usage"]["completion_tokens"] == n_output


async def test_n_predict_of_minus_one_is_what_is_left():
    """
    As if it were left out.
    """
    asked = {"prompt": "a", "seed": 1, "ignore_eos": True, "n_predict": -1}
    async with asking() as (app, client):
        answer = await client.post("/v1/completions", json=asked)
        n_ctx = app.state.service.engines["a"].n_ctx_slot

    assert answer.json()["usage"]["total_tokens"] == n_ctx


async def test_templates_know_the_day():
    """
    Under the names that llama.cpp's server gives; a client's own win.
    """
    template = "{{ date_string }}, {{ datetime }}: {{ messages[0].content }}"
    own = {"chat_template_kwargs": {"datetime": "now"}}
    async with chatting(chat_template=template) as engine:
        async with client_of(make_app(engine)) as client:
            told = await client.post("/apply-template", json=CHAT)
            given = await client.post("/apply-template", json=CHAT | own)

    today = datetime.now().astimezone()
    text = CHAT["messages"][0]["content"]
    assert told.json()["prompt"] == f"{today:%d %b %Y}, {today:%b %d %Y}: {text}"
    assert given.json()["prompt"] == f"{today:%d %b %Y}, now: {text}"


async def test_metrics_have_the_names_that_are_asked_for():
    """
    Those of llama.cpp's server stand without labels; cached tokens are counted apart.
    """
    names = {}
    for given in (("vllm",), ("llamacpp",), ("vllm", "llamacpp")):
        cache = PrefixCache(SnapshotKind.RANGE, max_bytes=10**6, max_entries=100)
        async with asking(metrics_names=given, cache=cache) as (_, client):
            answers = [await client.post(PATH, json=CHAT) for _ in range(2)]
            told = (await client.get("/metrics")).text
        names[given] = {line.partition(":")[0] for line in told.splitlines()}

    usages = [answer.json()["usage"] for answer in answers]
    n_prompt = sum(usage["prompt_tokens"] for usage in usages)
    n_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    lines = told.splitlines()
    assert n_cached > 0
    assert f"llamacpp:prompt_tokens_total {n_prompt - n_cached}.0" in lines
    assert f"llamacpp:prompt_tokens_cached_total {n_cached}.0" in lines
    assert "llamacpp:tokens_predicted_total 6.0" in lines
    assert "llamacpp:requests_processing 0.0" in lines
    values = dict(line.rsplit(" ", 1) for line in lines if line[:9] == "llamacpp:")
    seconds = float(values["llamacpp:prompt_seconds_total"])
    rate = float(values["llamacpp:prompt_tokens_seconds"])
    assert rate == pytest.approx((n_prompt - n_cached) / seconds)
    asked = {"vllm", "llamacpp"}
    assert [asked & found for found in names.values()] == [*map(set, names)]


async def test_many_scrapes_have_one_counter_of_an_engine():
    """
    Each scrape reads it, and none adds another one that every request would feed.
    """
    async with asking() as (app, client):
        engine = app.state.service.engines["a"]
        first = app.state.service.metrics_of(engine)
        for _ in range(3):
            await client.get("/metrics")
        await client.post(PATH, json=CHAT)
        counters = [each for each in gc.get_objects() if type(each) is type(first)]
        last = app.state.service.metrics_of(engine)

    assert last is first
    assert [c for c in counters if c._engine is engine] == [first]


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/completion"])
async def test_a_service_has_defaults_of_its_own(path):
    """
    For requests that do not say, in each dialect; what they say wins.
    """
    defaults = {"max_tokens": 2, "ignore_eos": True, "seed": 1}
    asked = {"prompt": "a"} if path != PATH else {"messages": CHAT["messages"]}
    async with asking(defaults=defaults) as (_, client):
        plain = (await client.post(path, json=asked)).json()
        own = (await client.post(path, json=asked | {"max_tokens": 3})).json()

    told = [
        answer.get("tokens_predicted")
        or answer.get("usage", {}).get("completion_tokens")
        for answer in (plain, own)
    ]
    assert told == [2, 3]


async def test_a_default_that_is_not_allowed_is_named():
    """
    With its place among the options of the service.
    """
    with pytest.raises(ConfigError, match=r"defaults.*temperature"):
        ServeConfig(defaults={"temperature": -1})


async def test_an_answer_tells_its_times_and_a_chat_its_prompt_if_it_shall():
    """
    Counts and times as llama-server's, and the prompt in `__verbose`.
    """
    asked = {"seed": 1, "max_tokens": 3, "prompt": "a prompt"}
    async with asking() as (_, client):
        text = (await client.post("/v1/completions", json=asked)).json()
        chat = (await client.post(PATH, json=CHAT | {"verbose": True})).json()
        plain = (await client.post(PATH, json=CHAT)).json()

    assert text["timings"]["predicted_n"] == chat["timings"]["predicted_n"] == 3
    assert chat["__verbose"] == {"prompt": "<s>a chat"}
    assert "__verbose" not in plain


async def test_a_template_need_not_ask_for_an_answer():
    """
    Of a prompt that is shown, and of one that is answered.
    """
    template = "{{ messages[0].content }}{% if add_generation_prompt %}: {% endif %}"
    async with chatting(chat_template=template) as engine:
        async with client_of(make_app(engine)) as client:
            told = []
            for asks in (None, True, False):
                asked = CHAT | {"add_generation_prompt": asks}
                shown = (await client.post("/apply-template", json=asked)).json()
                answer = (
                    await client.post(PATH, json=asked | {"verbose": True})
                ).json()
                told.append((shown["prompt"], answer["__verbose"]["prompt"]))

    assert told == [("a chat: ", "<s>a chat: ")] * 2 + [("a chat", "<s>a chat")]


async def test_props_tell_the_defaults():
    """
    In the words of llama-server.
    """
    async with asking(defaults={"seed": 7, "stages": ["typical"]}) as (_, client):
        props = (await client.get("/props")).json()

    params = props["default_generation_settings"]["params"]
    assert (params["seed"], params["samplers"]) == (7, ["typ_p"])


def test_seeds_below_zero_are_taken():
    """
    As 32 bits; -1 is another one each time.
    """
    prompt, chat = {"prompt": "a"}, {"messages": [CHAT["messages"][0]]}
    bodies = {CompletionBody: prompt, ChatBody: chat, NativeCompletionBody: prompt}
    seeds = [
        [body.model_validate(asked | {"seed": seed}).seed for seed in (1, -2, -1, -1)]
        for body, asked in bodies.items()
    ]

    assert [each[:2] for each in seeds] == [[1, 2**32 - 2]] * 3
    assert len({seed for each in seeds for seed in each[2:]}) > 1


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
async def test_a_whole_answer_tells_the_outputs_that_failed(path):
    """
    Beside the others, each with its index.
    """
    executor = FakeExecutor(fake_limits(), failing_rows=frozenset({(2, 2)}))
    asked = {"prompt": "hello", "seed": 1, "max_tokens": 5, "n": 3}
    async with (
        chatting(executor) as engine,
        client_of(make_app({"a": engine})) as client,
    ):
        told = (await client.post(path, json=asked)).json()

    outputs = told if isinstance(told, list) else told["choices"] + told["errors"]
    failed = outputs.pop()
    assert [output["index"] for output in outputs] == [0, 2]
    assert (failed["index"], failed["error"]["type"]) == (1, "server_error")
