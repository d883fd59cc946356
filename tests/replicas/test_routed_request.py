"""What a router reads in a request."""

import json

import pytest

from pyllama_raw.replicas.relay import BLOCK_BYTES, N_OUTPUT, routed_request
from pyllama_raw.routing import RoutedRequest

LONG = "word " * 400


def body(**fields) -> bytes:
    return json.dumps(fields).encode()


def chat(*texts: str, **fields) -> RoutedRequest:
    messages = [{"role": "user", "content": text} for text in texts]
    return routed_request({}, body(messages=messages, **fields))


def n_common(request: RoutedRequest, other: RoutedRequest) -> int:
    return len({*request.blocks} & {*other.blocks})


def test_a_chat_that_goes_on_has_its_blocks():
    """
    The last block is of both turns, so one less is common.
    """
    first, second = chat(LONG), chat(LONG, "and then", LONG)

    assert n_common(first, second) == len(first.blocks)
    assert len(second.blocks) > len(first.blocks)


@pytest.mark.parametrize(
    "field", [{"model": "b"}, {"cache_salt": "x"}, {"adapters": {"a": 1}}]
)
def test_what_shares_no_cache_has_no_common_block(field):
    """
    Engines keep the prefixes of each model, salt and set of adapters apart.
    """
    assert n_common(chat(LONG), chat(LONG, **field)) == 0


def test_prompts_are_texts_or_tokens():
    """
    Either goes on as a chat does.
    """
    texts = [routed_request({}, body(prompt=LONG + end)) for end in ("", LONG)]
    tokens = [routed_request({}, body(prompt=[7] * n)) for n in (4 * BLOCK_BYTES, 5000)]

    assert n_common(*texts) == len(texts[0].blocks) > 1
    assert n_common(*tokens) == len(tokens[0].blocks) > 1


def test_tokens_are_estimated_with_the_output():
    """
    A request that sets no limit has a usual one.
    """
    short = routed_request({}, body(prompt="a" * 400))
    limited = routed_request({}, body(prompt="a" * 400, max_tokens=1000))

    assert (short.n_tokens, limited.n_tokens) == (100 + N_OUTPUT, 1100)


def test_a_session_is_named_by_the_header_or_the_body():
    """
    The header wins, as routers of others set it.
    """
    content = body(prompt="a", prompt_cache_key="mine")

    assert routed_request({"x-session-id": "yours"}, content).session == "yours"
    assert routed_request({}, content).session == "mine"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"prompt": 3, "max_tokens": "x", "messages": {}}']
)
def test_any_body_can_be_routed(content):
    """
    What is wrong with it is the replica's to say.
    """
    assert routed_request({}, content).session is None
