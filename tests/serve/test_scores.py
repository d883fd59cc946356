"""Scores and classes over HTTP: ours, and the words of vLLM and SGLang."""

from contextlib import asynccontextmanager
from math import exp

import httpx
import pytest

from pyllama_raw import CacheConfig
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.engine.build import make_cache
from pyllama_raw.serve import ServeConfig, make_app
from tests.serve.support import LIMIT_S, chatting

pytestmark = pytest.mark.anyio

PROMPT = "The capital of France is"
ENDS = [" Paris", " Rome", " a river"]
CHAT = [{"role": "user", "content": "Good or bad?"}]


@asynccontextmanager
async def served(config=None, **options):
    """An engine, and a client of its service."""
    cache = make_cache(CacheConfig(mode="live"), SnapshotKind.RANGE)
    async with chatting(cache=cache, **options) as engine:
        transport = httpx.ASGITransport(make_app({"a": engine}, config))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://here", timeout=LIMIT_S
        ) as client:
            yield engine, client


async def test_scores_are_those_of_the_engine():
    """
    Of texts and of token ids; the prompt counts once, and only its last token is computed again.
    """
    ids = [[65, 66], [67]]
    async with served() as (engine, client):
        likelihoods = await engine.score_many(PROMPT, ENDS)
        of_ids = await engine.score_many([256, 65], ids)
        await engine.clear_cache()
        body = {"prompt": PROMPT, "continuations": ENDS}
        answer = (await client.post("/v1/score", json=body)).json()
        body = {"prompt": [256, 65], "continuations": ids, "logprobs": 1}
        listed = (await client.post("/score", json=body)).json()

    n_prompt = 1 + len(PROMPT)
    assert [entry["score"] for entry in answer["data"]] == [
        likelihood.total for likelihood in likelihoods
    ]
    assert answer["data"][1] == {
        "index": 1,
        "object": "score",
        "score": likelihoods[1].total,
        "per_token": likelihoods[1].per_token,
        "per_byte": likelihoods[1].per_byte,
        "n_tokens": 5,
    }
    assert answer["usage"]["prompt_tokens"] == n_prompt + sum(map(len, ENDS))
    assert answer["usage"]["completion_tokens"] == 0
    assert [entry["score"] for entry in listed["data"]] == [
        likelihood.total for likelihood in of_ids
    ]
    token = listed["data"][0]["tokens"][0]
    assert (token["id"], token["token"], len(token["top"])) == (65, "A", 1)


async def test_a_text_gets_the_likeliest_label():
    """
    In vLLM's words: probabilities stand in the order of the labels, and sum up to 1.
    """
    labels = [" positive", " bad"]
    async with served() as (engine, client):
        of_text = await engine.classify("It is", labels)
        of_chat = await engine.classify(CHAT, ["good", "bad!"], "per_token")
        body = {"input": ["It is", "It was"], "labels": labels}
        texts = (await client.post("/v1/classify", json=body)).json()
        body = {"messages": CHAT, "labels": ["good", "bad!"], "measure": "per_token"}
        chat = (await client.post("/classify", json=body)).json()

    first, second = texts["data"]
    by_index = {score.index: score for score in of_text}
    assert (first["label"], first["num_classes"]) == (" bad", 2)
    assert first["probs"] == [by_index[0].probability, by_index[1].probability]
    assert first["logprobs"] == [by_index[i].likelihood.total for i in (0, 1)]
    assert (second["index"], sum(second["probs"])) == (1, pytest.approx(1))
    assert [entry["label"] for entry in chat["data"]] == [of_chat[0].label]


@pytest.mark.parametrize("is_softmax", [False, True])
async def test_labels_behind_items_are_scored_as_sglang_does(is_softmax):
    """
    A list for each item, with the probability of each token of the vocabulary, or of the labels.
    """
    async with served() as (engine, client):
        body = {
            "query": "Is it ",
            "items": ["red", "green"],
            "label_token_ids": [65, 66],
        }
        body |= {"apply_softmax": is_softmax, "model": "a"}
        answer = (await client.post("/v1/score", json=body)).json()
        first = (
            await client.post("/v1/score", json=body | {"item_first": True})
        ).json()
        alone = await engine.score_many("Is it red", [[65], [66]])

    values = [exp(likelihood.total) for likelihood in alone]
    expected = [value / sum(values) for value in values] if is_softmax else values
    assert answer["object"] == "scoring"
    assert answer["scores"][0] == pytest.approx(expected)
    assert [len(scores) for scores in answer["scores"] + first["scores"]] == [2] * 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("score", {"prompt": PROMPT}, "continuations"),
        ("score", {"prompt": PROMPT, "continuations": []}, "continuations"),
        ("score", {"prompt": PROMPT, "continuations": ["a", ""]}, "continuations[1]"),
        ("score", {"continuations": ["a"]}, "prompt"),
        ("score", {"prompt": "", "continuations": ["a"]}, "prompt"),
        ("score", {"prompt": "a", "messages": CHAT, "continuations": ["a"]}, "prompt"),
        (
            "score",
            {"prompt": "a", "continuations": ["a", "b" * 500]},
            "continuations[1]",
        ),
        ("score", {"prompt": "a", "continuations": ["a"] * 5}, "continuations"),
        ("score", {"query": "a", "label_token_ids": []}, "label_token_ids"),
        ("score", {"query": "a", "items": [[1]], "label_token_ids": [5]}, "items"),
        ("score", {"query": "a", "label_token_ids": [1, -5]}, "label_token_ids[1]"),
        ("score", {"query": [-1], "label_token_ids": [1]}, "query"),
        ("score", {"text_1": "a", "text_2": "b"}, "text_1"),
        (
            "score",
            {"query": "a", "label_token_ids": [1], "continuations": ["b"]},
            "continuations",
        ),
        ("score", {"query": "a", "label_token_ids": [1], "logprobs": 0}, "logprobs"),
        ("score", {"prompt": "a", "continuations": ["b"], "query": "c"}, "query"),
        (
            "score",
            {"prompt": "a", "continuations": ["b"], "apply_softmax": True},
            "apply_softmax",
        ),
        (
            "score",
            {"messages": CHAT, "items": [[3]], "label_token_ids": [1]},
            "items",
        ),
        ("classify", {"input": "a"}, "labels"),
        ("classify", {"input": ["a", ""], "labels": ["a"]}, "input"),
        ("classify", {"input": "a", "labels": ["a", ""]}, "labels[1]"),
        ("classify", {"input": [[-1]], "labels": ["a"]}, "input"),
        ("classify", {"input": ["a", "b", "c"], "labels": ["a", "b"]}, "labels"),
    ],
)
async def test_a_mistake_has_its_place(path, body, param):
    """
    400, with the field that is wrong, and its place in it.
    """
    async with served(ServeConfig(max_texts=4)) as (_, client):
        answer = await client.post(f"/v1/{path}", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


async def test_prompts_of_a_list_share_their_beginning():
    """
    As a benchmark asks for choices: tokens that prompts have in common are computed and scored
    once, and the answer has the scores of all.
    """
    prompts = [PROMPT + text for text in ENDS]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1}
    async with served() as (engine, client):
        n_before = engine.stats().computed_tokens
        answer = (await client.post("/v1/completions", json=body)).json()
        n_computed = engine.stats().computed_tokens - n_before
        await engine.clear_cache()
        scores = [await engine.score(p, 1, cache_salt=p) for p in prompts]

    for choice, score in zip(answer["choices"], scores, strict=True):
        listed = choice["logprobs"]["token_logprobs"][1 : len(score.token_ids)]
        assert listed == [entry.logprob for entry in score.logprobs]
    n_shared = 1 + len(PROMPT + " ")
    assert n_computed < n_shared + sum(map(len, ENDS)) + 2 * len(ENDS)


async def test_tokens_of_scores_count_for_a_key_and_keys_share_nothing(monkeypatch):
    """
    With a salt for each key, the scores of one caller are no hit of another one.
    """
    monkeypatch.setenv("PYLLAMA_RAW_API_KEYS", "one sk-1, two sk-2")
    body = {"prompt": PROMPT, "continuations": ENDS[:1]}
    async with served(ServeConfig(salt_by_key=True)) as (_, client):
        cached = []
        for key in ("sk-1", "sk-2", "sk-1"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post("/v1/score", json=body, headers=headers)
            usage = answer.json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached[0] == cached[1] == 0 < cached[2]
