"""The dialect of OpenAI as any client reads it, on both event loops."""

import json

import anyio
import httpx2
import pytest

from pyllama_raw.serve import make_app
from tests.serve.support import LIMIT_S, chatting, serving
from tests.support.loops import anyio_backend

__all__ = ["anyio_backend"]
pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "a chat"}]}
PROMPTS = {"prompt": ["ab", "c"], "echo": True, "logprobs": 1, "n": 2}


@pytest.mark.parametrize(
    ("path", "fields"), [("chat/completions", CHAT), ("completions", PROMPTS)]
)
async def test_a_stream_is_events_to_its_mark(path, fields, anyio_backend_name):
    """
    Each is JSON on one line; the counts and [DONE] come last.
    """
    body = {**fields, "max_tokens": 3, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with httpx2.AsyncClient(timeout=LIMIT_S) as client:
                    answer = await client.post(f"{url}/v1/{path}", json=body)

    *events, done, nothing = answer.text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert (done, nothing) == ("data: [DONE]", "")
    assert chunks[-1]["choices"] == []
    n_outputs = 4 if "prompt" in fields else 1
    assert chunks[-1]["usage"]["completion_tokens"] == 3 * n_outputs
    assert {chunk["object"] for chunk in chunks} == {chunks[0]["object"]}
    indexes = {choice["index"] for chunk in chunks for choice in chunk["choices"]}
    assert indexes == set(range(n_outputs))
