"""Vectors and ranks over HTTP, beside a model that generates."""

from base64 import b64decode
from contextlib import asynccontextmanager

import anyio
import httpx
import numpy as np
import openai
import pytest

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import make_app
from tests.serve.support import LIMIT_S, serving
from tests.serve.test_chat import client_of
from tests.support.last_digits import assert_near
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]

TEXTS = ["a text", "another one, which is longer"]


@asynccontextmanager
async def three_models(backend):
    """The address of a service with a generator, an embedder and a reranker."""
    with anyio.fail_after(LIMIT_S):
        async with (
            AsyncEngine.open(tiny_model("llama")) as generator,
            AsyncEngine.open(tiny_model("bert")) as embedder,
            AsyncEngine.open(tiny_model("bert-rank")) as reranker,
        ):
            engines = {"g": generator, "e": embedder, "r": reranker}
            async with serving(make_app(engines), backend) as url:
                yield url, engines


async def test_vectors_are_those_of_the_engine(anyio_backend_name):
    """
    In both encodings, whole and cut.
    """
    async with three_models(anyio_backend_name) as (url, engines):
        wanted = await engines["e"].embed(TEXTS)
        async with client_of(url) as client:
            create = client.embeddings.create
            floats = await create(model="e", input=TEXTS, encoding_format="float")
            cut = await create(
                model="e", input=TEXTS[0], dimensions=8, encoding_format="float"
            )
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S
        ) as usual:
            default = await usual.embeddings.create(model="e", input=TEXTS)
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as plain:
            asked = {"model": "e", "input": TEXTS, "encoding_format": "base64"}
            answer = (await plain.post("/v1/embeddings", json=asked)).json()

    raw = [b64decode(each["embedding"]) for each in answer["data"]]
    assert_near([each.embedding for each in floats.data], wanted, 1e-5)
    assert_near([each.embedding for each in default.data], wanted, 1e-5)
    assert_near([np.frombuffer(each, "<f4") for each in raw], wanted, 1e-5)
    assert len(cut.data[0].embedding) == 8
    assert np.isclose(np.linalg.norm(cut.data[0].embedding), 1)
    assert floats.usage.prompt_tokens > 0


async def test_a_vector_is_of_what_its_input_stands_for(anyio_backend_name):
    """
    Whether a text is given as ids, in part as ids, as an object, or by another name.
    """
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "text"}]
    async with three_models(anyio_backend_name) as (url, engines):
        ids = await engines["e"].tokenize("a text")
        forms = [
            {"input": [ids, "a text", ["a text"]]},
            {"input": {"prompt_string": "a text"}},
            {"input": [{"content": parts}]},
            {"content": "a text"},
        ]
        mixed = [*await engines["e"].tokenize("a", add_special=True), ids[1]]
        wanted, of_mixed = await engines["e"].embed(["a text", mixed])
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:

            async def rows(**asked):
                answer = await client.post(
                    "/v1/embeddings", json={"model": "e"} | asked
                )
                return [each["embedding"] for each in answer.json()["data"]]

            same = [row for form in forms for row in await rows(**form)]
            [found] = await rows(input=["a", ids[1]])
            none = await client.post("/v1/embeddings", json={"input": []})

    assert np.allclose(same, [wanted] * 6)
    assert np.allclose(found, of_mixed)
    assert (none.status_code, none.json()["error"]["param"]) == (400, "input")


async def test_ranks_are_those_of_the_engine(anyio_backend_name):
    """
    The best first, with the place of each document; Cohere's clients have another path.
    """
    asked = {"model": "r", "query": "a question", "documents": TEXTS, "top_n": 1}
    async with three_models(anyio_backend_name) as (url, engines):
        wanted = await engines["r"].rank("a question", TEXTS)
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            answer = (await client.post("/v1/rerank", json=asked)).json()
            other = (await client.post("/v2/rerank", json=asked)).json()

    assert answer == other
    [best] = answer["results"]
    assert best["index"] == wanted[0].index
    assert np.isclose(best["relevance_score"], wanted[0].score)


async def test_routers_of_vllm_and_sglang_read_a_list_of_ranks(anyio_backend_name):
    """
    They name a request `rid`, which may be null, and the best ones top_k.
    """
    asked = {"query": "a question", "documents": TEXTS, "top_k": 1, "rid": None}
    asked |= {"model": "r", "user": None, "return_documents": True}
    async with three_models(anyio_backend_name) as (url, engines):
        [wanted, *_] = await engines["r"].rank("a question", TEXTS)
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            told = (await client.post("/v1/rerank", json=asked)).json()

    best = {"index": wanted.index, "document": TEXTS[wanted.index]}
    assert told == [best | {"score": pytest.approx(wanted.score)}]


async def test_ranked_texts_are_told_as_text_embeddings_inference_does(
    anyio_backend_name,
):
    """
    Each in a field `text`, where SGLang has a `document`.
    """
    body = {"model": "r", "query": "a question", "texts": TEXTS, "return_text": True}
    async with three_models(anyio_backend_name) as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            ranks = (await client.post("/rerank", json=body)).json()

    assert [set(rank) for rank in ranks] == [{"index", "score", "text"}] * len(TEXTS)
    assert all(rank["text"] == TEXTS[rank["index"]] for rank in ranks)


async def test_a_text_that_is_too_long_is_told_as_a_prompt_that_is(anyio_backend_name):
    """
    400, with the field, its place and both numbers.
    """
    asked = {"model": "e", "input": ["short", "long " * 2000]}
    ranked = {"model": "r", "query": "a", "documents": ["short", "long " * 2000]}
    # It would become tokens with each of many documents.
    long_query = {"model": "r", "query": "long " * 2000, "documents": ["short"] * 2000}
    async with three_models(anyio_backend_name) as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            answer = await client.post("/v1/embeddings", json=asked)
            other = await client.post("/v1/rerank", json=ranked)
            of_query = await client.post("/v1/rerank", json=long_query)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[1]")
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] > 0
    assert (other.status_code, other.json()["error"]["param"]) == (400, "documents[1]")
    assert (of_query.status_code, of_query.json()["error"]["param"]) == (400, "query")


async def test_each_model_is_asked_for_what_it_can_do(anyio_backend_name):
    """
    The mistake names the field; without a name the first model that can do it is taken.
    """
    async with three_models(anyio_backend_name) as (url, _):
        async with client_of(url) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.embeddings.create(model="r", input="a")
            models = [model.id async for model in client.models.list()]
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as plain:
            nameless = await plain.post("/v1/embeddings", json={"input": "a"})

    assert (caught.value.param, models) == ("model", ["g", "e", "r"])
    assert nameless.status_code == 200


async def test_documents_that_are_too_long_are_cut_if_a_client_says_so(
    anyio_backend_name,
):
    """
    As text-embeddings-inference and Cohere do: at the end, at the start, or behind some tokens. The
    answer repeats all of them.
    """
    long = "first " + "word " * 3000 + "last"
    body = {"model": "r", "query": "a question", "documents": [long, "b"]}
    cuts = [
        {"truncate": True},
        {"truncation": True, "truncation_direction": "Left"},
        {"max_tokens_per_doc": 8},
        {"max_tokens_per_doc": 10**6},
    ]
    async with three_models(anyio_backend_name) as (url, engines):
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            refusal = await client.post("/v1/rerank", json=body)
            query = {"query": long, "truncate": True}
            long_query = await client.post("/v1/rerank", json=body | query)
            answers = [
                await client.post(
                    "/v1/rerank", json=body | cut | {"return_documents": True}
                )
                for cut in cuts
            ]
        [short] = await engines["r"].rank("a question", ["first"])

    params = [answer.json()["error"]["param"] for answer in (refusal, long_query)]
    assert params == ["documents[0]", "query"]
    assert [answer.status_code for answer in answers] == [200] * len(cuts)
    scores = []
    for answer in answers:
        results = sorted(answer.json()["results"], key=lambda r: r["index"])
        assert [r["document"]["text"] for r in results] == [long, "b"]
        scores.append(results[0]["relevance_score"])
    assert scores[0] == pytest.approx(scores[3])
    assert len({round(score, 5) for score in scores[:3]}) == 3
    counts = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
    assert counts[2] < 4 * short.n_tokens < counts[0]
