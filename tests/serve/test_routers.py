"""What routers of vLLM and SGLang make of a request is answered as the request is."""

import openai
import pytest

from tests.serve.clients import talking
from tests.serve.support import chatting

pytestmark = pytest.mark.anyio

ADDED = {  # by vllm-router 0.1.17 and sglang-router 0.3.2
    "ignore_eos": False,
    "no_stop_trim": False,
    "return_hidden_states": False,
    "skip_special_tokens": True,
}
OF_CHATS = ADDED | {
    "continue_final_message": False,
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
}


async def test_fields_that_routers_add_change_nothing():
    """
    The texts of a completion and of a chat are those without them.
    """
    options = {"model": "a", "seed": 1, "max_tokens": 5}
    chat = options | {"messages": [{"role": "user", "content": "a chat"}]}
    async with chatting() as engine, talking(engine) as client:
        texts = [
            (await client.completions.create(**options, prompt="a", extra_body=body))
            .choices[0]
            .text
            for body in ({}, ADDED)
        ]
        contents = [
            (await client.chat.completions.create(**chat, extra_body=body))
            .choices[0]
            .message.content
            for body in ({}, OF_CHATS)
        ]

    assert texts[0] == texts[1]
    assert contents[0] == contents[1]


@pytest.mark.parametrize(("name", "value"), [("no_stop_trim", True), ("novel", False)])
async def test_other_values_and_other_fields_are_refused(name, value):
    """
    They are meant to change the output.
    """
    async with chatting() as engine, talking(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model="a", prompt="a", extra_body={name: value}
            )

    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")
