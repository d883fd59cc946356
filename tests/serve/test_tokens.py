"""Tokens, templates and facts over HTTP."""

import anyio
import httpx
import pytest

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import make_app
from tests.serve.support import LIMIT_S, serving
from tests.support.tiny import tiny_model

CHAT = [{"role": "user", "content": "a text"}]

pytestmark = [pytest.mark.anyio, pytest.mark.native]


async def test_tokens_go_there_and_back(anyio_backend_name):
    """
    In the words of llama-server and of vLLM.
    """
    with anyio.fail_after(LIMIT_S):
        async with AsyncEngine.open(tiny_model("llama")) as engine:
            wanted = await engine.tokenize("a text")
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:

                    async def post(path, **body):
                        return (await client.post(path, json=body)).json()

                    plain = await post("/tokenize", content="a text")
                    asked = {"content": "a text", "add_special": True}
                    content = await post("/tokenize", **asked)
                    pieces = await post("/tokenize", content="aé", with_pieces=True)
                    mixed = await post(
                        "/tokenize", content=["a text", *wanted, "a"], add_special=True
                    )
                    chat = await post("/tokenize", messages=CHAT)
                    parts = [{"type": "input_text", "text": "a text"}]
                    of_parts = await post(
                        "/tokenize", messages=[{"role": "user", "content": parts}]
                    )
                    n_chat = await engine.count(CHAT)
                    prompt = await post("/tokenize", prompt="a text")
                    text = await post("/detokenize", tokens=wanted)
                    no_ids = await post("/detokenize", tokens=[1, 2**40])
                    nothing = await post("/tokenize")
                    no_chat = await post("/tokenize", messages=[])
                    info = (await client.get("/tokenizer_info")).json()

    assert content == prompt
    assert plain["tokens"] == wanted[1:]
    assert mixed["tokens"][: 2 * len(wanted)] == [*wanted, *wanted]
    assert mixed["count"] > 2 * len(wanted)
    assert [each["piece"] for each in pieces["tokens"]] == ["a", [0xC3], [0xA9]]
    assert chat["count"] == of_parts["count"] == n_chat
    assert (content["tokens"], content["count"]) == (wanted, len(wanted))
    assert content["max_model_len"] == engine.n_ctx_slot
    assert "a text" in text["content"]
    assert nothing["error"]["param"] == "content"
    assert no_ids["error"]["param"] == "tokens"
    assert no_chat["error"]["message"] == "messages: give at least one message"
    assert info["eos_token"]


async def test_facts_of_a_service(anyio_backend_name):
    """
    Its metrics have the name of the model, and its slots are all there; a slash changes no list.
    """
    with anyio.fail_after(LIMIT_S):
        async with AsyncEngine.open(tiny_model("llama")) as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                    metrics = (await client.get("/metrics")).text
                    slots = (await client.get("/slots")).json()
                    props = (await client.get("/props")).json()
                    models = (await client.get("/v1/models")).json()
                    slash = (await client.get("/v1/models/")).json()
                    statuses = {
                        path: (await client.get(path)).status_code
                        for path in ("/livez", "/readyz", "/health", "/lora-adapters")
                    }

    assert 'vllm:num_requests_running{model_name="a"} 0.0' in metrics
    assert len(slots) == props["total_slots"] == engine.stats().n_slots
    assert set(statuses.values()) == {200}
    assert models == slash
