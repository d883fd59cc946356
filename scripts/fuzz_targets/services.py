"""Packets that a runner is asked with, and answers of a service to each verb of a runner."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pyllama_raw.errors import InvalidRequest, PyllamaError, RequestError
from scripts.fuzz_targets.target import JSON_WORDS, Target, Try


def _packets() -> Try:
    from pyllama_raw.runners.packet import TensorPacket, asked_by

    def attempt(data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict) and "metadata" in value:
            asked_by(value["metadata"])
        packet = TensorPacket.read(value)
        assert TensorPacket.read(packet.told()) == packet
        assert packet.text.encode() == packet.data

    return attempt


def _packet_seeds() -> list[bytes]:
    metadata = {
        "max_new_tokens": 4,
        "timeout_ms": 5.0,
        "priority": 1,
        "seed": 2**40,
        "temperature": 0.5,
        "stop": ["a"],
    }
    packets: list[dict[str, Any]] = [
        {"shape": [1, 3], "dtype": "uint8", "data": [97, 98, 99]},
        {"shape": [1, 3], "dtype": "u8", "data_base64": "YWJj"},
        {"shape": [2], "dtype": "float32", "base64": "AAAAAAAAAAA="},
        {"shape": [], "data": "a"},
    ]  # fmt: skip
    return [json.dumps(packet | {"metadata": metadata}).encode() for packet in packets]


HEADERS_END = b"\n\n"


def _answers() -> Try:
    """
    A service answers with a status, headers and a content, to each verb.

    Whatever comes, the caller has a result or a typed error.
    """
    import httpx2

    from pyllama_raw import SamplingParams
    from pyllama_raw.runners import Backoff, RemoteRunner, Timeouts

    loop, answer = asyncio.new_event_loop(), [b""]

    def handle(_: Any) -> Any:
        head, _, content = answer[0].partition(HEADERS_END)
        first, *lines = head.split(b"\n")
        status = (
            int(first)
            if first.isdigit() and len(first) == 3 and first[:1] != b"1"
            else 200
        )
        headers = [tuple(line.split(b":", 1)) for line in lines if b":" in line]
        halves = content[: len(content) // 2], content[len(content) // 2 :]

        async def parts() -> Any:
            for half in halves:
                yield half

        return httpx2.Response(status, headers=headers, content=parts())

    async def ask(verb: int) -> None:
        transport, limits = httpx2.MockTransport(handle), Timeouts()
        once = Backoff(max_retries=0)
        async with RemoteRunner(
            "http://a", "m", transport=transport, timeouts=limits, backoff=once
        ) as runner:
            match verb % 6:
                case 0:
                    await runner.embed(["a", "b"])
                case 1:
                    await runner.rank("q", ["a", "b"])
                case 2:
                    await runner.card()
                case 3:
                    await runner.version()
                case 4:
                    await runner.health()
                case _:
                    params = SamplingParams(max_tokens=4, n=2, logprobs=1)
                    await runner.generate(
                        "a" if verb < 128 else [{"role": "user", "content": "a"}],
                        params,
                    ).collect()

    def attempt(data: bytes) -> None:
        answer[0] = data[1:]
        loop.run_until_complete(ask(data[0] if data else 0))

    return attempt


def _answer_seeds() -> list[bytes]:
    def event(value: Any) -> bytes:
        return b"data: %b\n\n" % json.dumps(value).encode()

    listed = {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "b", "logprob": -1}],
            }
        ]
    }
    legacy = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}
    call = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    head = b"200\ncontent-type: text/event-stream" + HEADERS_END
    plain = b"200\ncontent-type: application/json" + HEADERS_END
    chat = b"".join(
        event({"choices": [choice], "usage": usage})
        for index in (0, 1)
        for choice in (
            {
                "index": index,
                "delta": {"content": "a", "reasoning_content": "r"},
                "logprobs": listed,
            },
            {
                "index": index,
                "delta": {"tool_calls": [call]},
                "finish_reason": "tool_calls",
            },
        )
    )
    text = b"".join(
        event(
            {
                "choices": [
                    {
                        "index": i,
                        "text": "a",
                        "logprobs": legacy,
                        "finish_reason": "stop",
                    }
                ]
            }
        )
        for i in (0, 1)
    )
    error = json.dumps(
        {
            "error": {
                "message": "no",
                "type": "rate_limit_error",
                "code": "context_length_exceeded",
                "param": "a",
            }
        }
    ).encode()
    rows = json.dumps(
        {"data": [{"index": i, "embedding": [0.5, 1]} for i in (1, 0)], "usage": usage}
    ).encode()
    ranks = json.dumps(
        {"results": [{"index": i, "relevance_score": 0.5} for i in (1, 0)]}
    ).encode()
    card = json.dumps(
        {"data": [{"id": "m", "capabilities": ["generate"]}], "build_info": "b1"}
    ).encode()
    refused = (
        b"429\nretry-after: 5\nx-ratelimit-remaining-requests: 1\ncontent-type: application/json"
        + HEADERS_END
        + error
    )
    done = b"data: [DONE]\n\n"
    return [
        b"\x05" + head + text + done, b"\x83" + head + chat + done, b"\x05" + head + event(json.loads(error)),
        b"\0" + plain + rows, b"\1" + plain + ranks, b"\2" + plain + card, b"\3" + plain + card, b"\4" + refused,
        b"\x05" + refused, b"\0" + refused, b"\0" + plain.replace(b"application", b"a\ncontent-encoding: gzip\nb"),
    ]  # fmt: skip


ANSWER_WORDS = (
    *JSON_WORDS, b"data: ", b"\n\n", b"[DONE]", b"event: error\n", b"retry-after: ", b"retry-after-ms: ", b"choices", b"delta",
    b"content", b"logprobs", b"top_logprobs", b"index", b"finish_reason", b"content_filter", b"tool_calls", b"usage",
    b"error", b"message", b"code", b"content-encoding: br\n", b"content-encoding: gzip\n", b"503", b"401", b"302\nlocation: /",
    b"x-ratelimit-limit-requests: ", b"x-ratelimit-reset-tokens: 1h", b"-1", b"1e400", b"charset=utf-16",
)  # fmt: skip

TARGETS = (
    Target("packets", _packets, _packet_seeds, (InvalidRequest, RequestError), words=(*JSON_WORDS, b"shape", b"dtype", b"data", b"base64", b"metadata", b"max_tokens")),
    Target("answers", _answers, _answer_seeds, (PyllamaError,), words=ANSWER_WORDS, n_head=1),
)  # fmt: skip
