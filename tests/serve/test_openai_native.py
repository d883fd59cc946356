"""The dialect of OpenAI on tiny models: images, schemas, scores and the cache."""

import base64
import json

import openai
import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    Image,
    MediaConfig,
    SamplingParams,
)
from pyllama_raw.serve import make_app
from tests.media.files import image_file, wav_file
from tests.serve.clients import (
    chat_chunks,
    completion_chunks,
    joined_chat,
    joined_completion,
    talking,
    whole_chat,
)
from tests.serve.test_gate import client_of
from tests.support.last_digits import assert_near
from tests.support.tiny import tiny_model, tiny_projector

pytestmark = [pytest.mark.anyio, pytest.mark.native]

CONTEXT = ContextConfig(n_ctx=1024)
MESSAGES = [{"role": "user", "content": "hello there, say something of some length"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


def formatted(schema: object) -> dict[str, object]:
    wanted = {"name": "answer", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def shows(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": url}


def messages(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def small() -> object:
    return AsyncEngine.open(tiny_model("llama"), EngineConfig(context=CONTEXT))


def seeing(name: str = "llava") -> object:
    projector, model = tiny_projector(name)
    config = EngineConfig(context=CONTEXT, media=MediaConfig(mmproj=projector))
    return AsyncEngine.open(model, config)


@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 3}, {"n": 2}, formatted(SCHEMA)]
)
async def test_a_stream_of_a_model_is_the_whole_answer(fields):
    """
    At an equal seed; with a schema it is JSON that fits.
    """
    asked = {"messages": MESSAGES, "seed": 3, "max_tokens": 24} | fields
    async with small() as engine, talking(engine) as client:
        whole = await client.chat.completions.create(model="a", **asked)
        chunks = await chat_chunks(client, [], **asked)

    assert joined_chat(chunks) == whole_chat(whole)
    if "response_format" in fields:
        assert set(json.loads(whole.choices[0].message.content)) == {"a"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True, "contains": {"type": "integer"}},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "minProperties": 3},
        {"type": 3},
    ],
)
async def test_a_schema_that_cannot_be_held_is_refused(schema):
    """
    It is never let go silently.
    """
    async with small() as engine, talking(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="a", messages=MESSAGES, max_tokens=4, **formatted(schema)
            )

    assert caught.value.param == "response_format"


async def test_props_tell_images_and_sounds_apart():
    """
    What the projector takes.
    """
    async with seeing() as engine, seeing("ultravox") as hearing, small() as other:
        engines = {"images": engine, "sounds": hearing, "neither": other}
        async with client_of(make_app(engines)) as client:
            answers = [await client.get("/props", params={"model": n}) for n in engines]

    told = [answer.json()["modalities"] for answer in answers]
    assert [{name for name in each if each[name]} for each in told] == [
        {"vision"},
        {"audio"},
        set(),
    ]


async def test_an_image_is_seen_whole_and_streamed():
    """
    A data URL is an image for a model with a projector.
    """
    picture = shows({"url": data_url(image_file("PNG"))})
    asked = {
        "messages": messages({"type": "text", "text": "see "}, picture),
        "seed": 3,
        "max_tokens": 6,
    }
    async with seeing() as engine, talking(engine) as client:
        whole = await client.chat.completions.create(model="a", **asked)
        chunks = await chat_chunks(client, [], **asked)
        n_encoded = engine.stats().encodes

    assert joined_chat(chunks) == whole_chat(whole)
    assert n_encoded == 1


async def test_a_raw_prompt_has_images_at_its_markers():
    """
    As llama-server has them: the prompt is that of the engine's list, and a stream counts its rows.
    """
    picture = image_file("PNG")
    data = [base64.b64encode(picture).decode()]
    raw = {"prompt_string": "see <__media__> now", "multimodal_data": data}
    asked = {"prompt": raw, "temperature": 0, "n_predict": 5, "return_tokens": True}
    async with seeing() as engine, client_of(make_app({"a": engine})) as client:
        own = await engine.complete(
            ["see ", Image(picture), " now"],
            SamplingParams(temperature=0, max_tokens=5),
        )
        whole = (await client.post("/completion", json=asked)).json()
        stream = await client.post("/completion", json=asked | {"stream": True})

    assert tuple(whole["tokens"]) == own.token_ids
    assert whole["tokens_evaluated"] == own.usage.prompt_tokens > 10
    first = json.loads(stream.text.splitlines()[0][6:])
    assert first["tokens_evaluated"] == own.usage.prompt_tokens


@pytest.mark.parametrize(
    ("text", "data", "place"),
    [
        ("no marker", ["eA=="], "prompt.multimodal_data"),
        ("<__media__><__media__>", ["eA=="], "prompt.multimodal_data"),
        ("<__media__>", ["?"], "prompt.multimodal_data[0]"),
        ("<__media__>", ["eA=="], "prompt.multimodal_data[0]"),
    ],
)
async def test_wrong_media_of_a_raw_prompt_have_their_place(text, data, place):
    """
    A number of markers that is not that of the media, and data that is no image.
    """
    prompt = {"prompt_string": text, "multimodal_data": data}
    async with seeing() as engine, client_of(make_app({"a": engine})) as client:
        answer = await client.post("/completion", json={"prompt": prompt})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, place)


@pytest.mark.parametrize(
    "part",
    [
        shows({"url": "https://127.0.0.1/a.png"}),
        shows({"url": "file:///etc/passwd"}),
        shows({"url": "data:image/png;base64,?"}),
        shows({"url": data_url(b"no image at all")}),
        shows({}),
        {"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}},
        {"type": "image", "image": "/etc/passwd"},
    ],
)
async def test_a_wrong_image_has_its_place(part):
    """
    Whether its address, its data or its content is wrong.
    """
    good = shows({"url": data_url(image_file("PNG"))})
    async with seeing() as engine, talking(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="a", messages=messages(good, part), max_tokens=4
            )

    assert caught.value.param == "messages[0].content[1]"


async def test_a_sound_for_a_model_that_only_sees_is_refused():
    """
    As a mistake of the messages.
    """
    data = base64.b64encode(wav_file()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    async with seeing() as engine, talking(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="a", messages=messages(part), max_tokens=4
            )

    assert caught.value.param == "messages"


async def test_an_address_of_ones_own_network_is_refused_where_media_is_fetched():
    """
    With fetch_media, too.
    """
    part = shows({"url": "http://127.0.0.1:9/a.png"})
    async with seeing() as engine, talking(engine, fetch_media=True) as client:
        with pytest.raises(openai.BadRequestError, match="no public host") as caught:
            await client.chat.completions.create(
                model="a", messages=messages(part), max_tokens=4
            )

    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("file://a%20b.png", None),
        ("file:////a b.png", None),
        ("file://nothing.png", "no_such_file"),
        ("file://../beside.png", "no_such_file"),
        ("file://%2e%2e/beside.png", "no_such_file"),
        ("file://link.png", "no_such_file"),
        ("file://", "no_such_file"),
        ("file://a%00", "no_such_file"),
        (f"file://{'a' * 5000}", "no_such_file"),
    ],
)
async def test_files_of_one_folder_may_be_named_by_option(name, code, tmp_path):
    """
    No others, wherever a name or a link leads.
    """
    folder = tmp_path / "media"
    folder.mkdir()
    for path in (folder / "a b.png", tmp_path / "beside.png"):
        path.write_bytes(image_file("PNG"))
    (folder / "link.png").symlink_to(tmp_path / "beside.png")
    found = None
    async with seeing() as engine, talking(engine, media_path=str(folder)) as client:
        asked = {"model": "a", "messages": messages(shows({"url": name}))}
        try:
            await client.chat.completions.create(**asked, max_tokens=1)
        except openai.BadRequestError as error:
            found = error.code

    assert found == code


async def test_scores_over_http_are_those_of_the_engine():
    """
    Log-likelihoods of an echoed prompt, as benchmarks sum them.
    """
    async with small() as engine, talking(engine, strict=False) as client:
        ids = await engine.tokenize("The quick brown fox jumps over the lazy dog")
        score = await engine.score(ids)
        asked = {"prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True}
        whole = await client.completions.create(model="a", temperature=0, **asked)
        chunks = await completion_chunks(client, temperature=0, **asked)

    told = whole.choices[0].logprobs.token_logprobs[1:-1]
    assert told == pytest.approx([e.logprob for e in score.logprobs], abs=1e-4)
    assert sum(told) == pytest.approx(score.total, abs=1e-4)
    assert joined_completion(chunks)[0][:3] == joined_completion([whole])[0][:3]


async def test_a_bias_of_100_chooses_its_token():
    """
    As OpenAI's API says of the largest one.
    """
    async with small() as engine, talking(engine) as client:
        [token] = await engine.tokenize("a", add_special=False)
        answer = await client.completions.create(
            model="a", prompt="x", max_tokens=4, logit_bias={str(token): 100}
        )
        expected = await engine.detokenize([token] * 4)

    assert answer.choices[0].text == expected


async def test_vectors_are_numbers_or_base64():
    """
    The client unpacks the base64 that it asks for by itself, but not where it checks types.
    """
    config = EngineConfig(context=CONTEXT)
    asked = {"model": "a", "input": ["one", "two words"]}
    async with AsyncEngine.open(tiny_model("bert"), config) as engine:
        async with talking(engine, strict=False) as client:
            packed = await client.embeddings.create(**asked)
        async with talking(engine) as client:
            listed = await client.embeddings.create(**asked, encoding_format="float")

    assert [each.index for each in listed.data] == [0, 1]
    for one, other in zip(packed.data, listed.data, strict=True):
        assert_near(one.embedding, other.embedding, 1e-6)


async def test_the_second_turn_tells_its_cached_tokens():
    """
    Usage has the tokens of the prompt that were not computed.
    """
    long = [{"role": "user", "content": "a long chat " * 20}]
    async with small() as engine, talking(engine) as client:
        create = client.chat.completions.create
        for _ in range(2):
            answer = await create(model="a", messages=long, max_tokens=1)

    assert answer.usage.prompt_tokens_details.cached_tokens > 0
