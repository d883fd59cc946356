"""Prompts and gaps in the words of llama.cpp's server."""

import json
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig, ModelConfig
from pyllama_raw.serve import make_app
from scripts.tiny_models import vocab
from tests.serve.support import LIMIT_S, serving
from tests.support.tiny import tiny_adapter, tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]

PREFIX, SUFFIX, MIDDLE = vocab.MASK, vocab.SEP, vocab.UNKNOWN
FILLS = {
    "tokenizer.ggml.fim_pre_token_id": PREFIX,
    "tokenizer.ggml.fim_suf_token_id": SUFFIX,
    "tokenizer.ggml.fim_mid_token_id": MIDDLE,
}


@asynccontextmanager
async def served(backend, *, n_ctx=None, **overrides):
    """A client of a service, and the engine."""
    config = EngineConfig(
        model=ModelConfig(kv_overrides=overrides), context=ContextConfig(n_ctx=n_ctx)
    )
    with anyio.fail_after(LIMIT_S):
        async with AsyncEngine.open(tiny_model("llama"), config) as engine:
            async with serving(make_app({"a": engine}), backend) as url:
                async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                    yield client, engine


async def answer(client, path="/completion", **body):
    """What a request is answered; it has to work."""
    response = await client.post(path, json={"seed": 1, "n_predict": 5} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client, **body):
    """Of a stream."""
    asked = {"seed": 1, "n_predict": 5, "stream": True} | body
    text = (await client.post("/completion", json=asked)).text
    return [json.loads(line[6:]) for line in text.splitlines() if line]


async def test_a_stream_has_the_text_of_the_whole_answer(anyio_backend_name):
    """
    At an equal seed; the last event has no text, and all else.
    """
    async with served(anyio_backend_name) as (client, engine):
        asked = {"prompt": "a prompt", "n_probs": 2, "cache_prompt": False}
        whole = await answer(client, **asked, return_tokens=True)
        *parts, last = await events(client, **asked)
        n_prompt = await engine.count("a prompt")

    listed = [p for part in parts for p in part["completion_probabilities"]]
    assert "".join(part["content"] for part in parts) == whole["content"] != ""
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert listed == whole["completion_probabilities"]
    assert [len(p["top_logprobs"]) for p in listed] == [2] * 5
    assert (last["stop"], last["stop_type"], last["content"]) == (True, "limit", "")
    assert last["tokens_evaluated"] == n_prompt == last["timings"]["prompt_n"]
    assert last["generation_settings"]["n_predict"] == 5
    assert last["prompt"] == "<|startoftext|>a prompt"


async def test_a_list_is_of_prompts_unless_it_has_token_ids(anyio_backend_name):
    """
    A single answer is an object, several are a list, with their outputs counted through.
    """
    async with served(anyio_backend_name) as (client, engine):
        ids = await engine.tokenize("a prompt")
        plain = await engine.tokenize("b", add_special=False)
        asked = {"temperature": 0, "cache_prompt": False}
        several = ["a prompt", ids, {"prompt_string": "a prompt"}]
        mixed = await answer(client, prompt=[*ids, "b"], **asked)
        joined = await answer(client, prompt=[*ids, *plain], **asked)
        answers = await answer(client, prompt=several, **asked, n_cmpl=2)

    assert mixed["content"] == joined["content"]
    assert {each["content"] for each in answers} == {answers[0]["content"]}
    assert [each["index"] for each in answers] == list(range(6))


async def test_words_of_llama_cpp_are_understood(anyio_backend_name):
    """
    Values that switch something off, biases by text, and the choice of fields.
    """
    async with served(anyio_backend_name, n_ctx=256) as (client, engine):
        off = {"seed": -1, "grammar": "", "top_n_sigma": -1, "n_probs": 0, "stop": ""}
        told = await answer(client, prompt="a", **off, repeat_last_n=-1)
        fields = ["content", "generation_settings/seed", "nothing"]
        chosen = await answer(client, prompt="a", response_fields=fields)
        greedy = {"prompt": "a prompt", "temperature": 0, "n_predict": 1}
        first = await answer(client, **greedy, return_tokens=True)
        (token,) = first["tokens"]
        biases = ([[token, False]], {str(token): -1e5}, [[first["content"], False]])
        others = [await answer(client, **greedy, logit_bias=bias) for bias in biases]
        stop = await answer(
            client, **greedy | {"n_predict": 9}, stop=[first["content"]]
        )
        nothing = await answer(client, prompt="a prompt", n_predict=0)
        order = {"samplers": ["typ_p", "temperature"], "suppress_tokens": [1]}
        ordered = await answer(client, prompt="a", **order, logit_bias=[["b", False]])
        endless = await answer(client, prompt="a prompt", n_predict=-1)

    assert told["generation_settings"]["repeat_last_n"] == -1
    assert chosen == {"content": chosen["content"], "generation_settings/seed": 1}
    assert first["content"] not in [other["content"] for other in others]
    assert (stop["stop_type"], stop["stopping_word"]) == ("word", first["content"])
    assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)
    assert ordered["generation_settings"]["samplers"] == order["samplers"]
    assert endless["truncated"]
    assert endless["tokens_predicted"] + 4 >= engine.n_ctx_slot - 8


async def test_adapters_by_their_place(anyio_backend_name):
    """
    As `/lora-adapters` lists them.
    """
    async with served(anyio_backend_name) as (client, engine):
        await engine.load_adapter("lora", tiny_adapter("lora-a"))
        asked = {"prompt": "a prompt", "temperature": 0, "n_predict": 9}
        without = await answer(client, **asked)
        none = await answer(client, **asked, lora=[{"id": 0, "scale": 0}])
        full = await answer(client, **asked, lora=[{"id": 0, "scale": 1}])
        named = await answer(client, **asked, adapters={"lora": 1})
        unknown = await client.post(
            "/completion", json=asked | {"lora": [{"id": 1, "scale": 1}]}
        )

    assert without["content"] == none["content"] != full["content"]
    assert full["content"] == named["content"]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "lora")


async def test_a_gap_is_between_its_tokens(anyio_backend_name):
    """
    In the form of llama-server. What does not fit is cut from the far ends, and files that do not fit
    are left out.
    """
    async with served(anyio_backend_name, **FILLS) as (client, engine):
        texts = {"input_prefix": "one ", "prompt": "two", "input_suffix": "three"}
        extra = [{"text": "x" * 9000, "filename": "f"}, {"text": "code"}]
        short = await answer(client, "/infill", **texts, input_extra=extra)
        long = {"input_prefix": "1" * 9000, "input_suffix": "2" * 9000}
        cut = await answer(client, "/infill", **long)

    wanted = "<|mask|>one two<|sep|>three<|unknown|>"
    assert short["prompt"] == f"<|startoftext|>\n\n--- snippet ---\n\ncode{wanted}"
    assert cut["tokens_evaluated"] + 5 == engine.n_ctx_slot
    assert cut["prompt"].count("2") == (engine.n_ctx_slot - 9) // 4


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/completion", {}, 400, "prompt"),
        ("/completion", {"prompt": []}, 400, "prompt"),
        ("/completion", {"prompt": [1, [2]]}, 400, "prompt"),
        ("/completion", {"prompt": "a", "bogus": 1}, 400, "bogus"),
        ("/completion", {"prompt": "a", "n_predict": -2}, 400, "n_predict"),
        ("/completion", {"prompt": "a", "samplers": ["x"]}, 400, "samplers[0]"),
        ("/completion", {"prompt": [[99999]]}, 400, None),
        ("/infill", {"input_prefix": "", "input_suffix": ""}, 501, "model"),
    ],
)
async def test_a_mistake_names_its_field(path, body, status, param, anyio_backend_name):
    """
    Before anything is computed.
    """
    async with served(anyio_backend_name) as (client, _):
        response = await client.post(path, json=body)

    error = response.json()["error"]
    assert response.status_code == status
    assert param is None or error["param"] == param
