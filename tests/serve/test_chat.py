"""Chats as OpenAI's client sends them, with every answer checked against its types."""

import anyio
import openai
import pytest

from pyllama_raw.serve import make_app
from tests.serve.support import LIMIT_S, chatting, serving

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "a chat"}]


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
        timeout=LIMIT_S,
    )


async def test_a_stream_has_the_text_of_the_whole_answer(anyio_backend_name):
    """
    At an equal seed; the counts of tokens come last.
    """
    asked = {"model": "a", "messages": MESSAGES, "seed": 1, "max_tokens": 9}
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with client_of(url) as client:
                    create = client.chat.completions.create
                    whole = await create(**asked)
                    stream = await create(
                        **asked, stream=True, stream_options={"include_usage": True}
                    )
                    chunks = [chunk async for chunk in stream]

    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == whole.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 9
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "b"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"extra_body": {"bogus": 1}}, 400, "bogus"),
        ({"messages": []}, 400, "messages"),
    ],
)
async def test_a_mistake_names_its_field(fields, status, param, anyio_backend_name):
    """
    Before anything is computed.
    """
    asked = {"model": "a", "messages": MESSAGES} | fields
    with anyio.fail_after(LIMIT_S):
        async with chatting() as engine:
            async with serving(make_app({"a": engine}), anyio_backend_name) as url:
                async with client_of(url) as client:
                    with pytest.raises(openai.APIStatusError) as caught:
                        await client.chat.completions.create(**asked)

    assert (caught.value.status_code, caught.value.param) == (status, param)
