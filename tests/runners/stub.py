"""A service of few words: what it answers is told by a test, and what it was asked is kept."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

from pyllama_raw import Result
from pyllama_raw.runners import Backoff, RemoteRunner

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
DONE = b"data: [DONE]\n\n"
AT_ONCE = Backoff(first_s=0.0)
CHAT = [{"role": "user", "content": "a"}]
Reply = Callable[[httpx2.Request], httpx2.Response]


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def chunk(text: str = "", reason: str | None = None, index: int = 0, **fields) -> bytes:
    """A chunk that a chat and a completion read alike."""
    choice = {"index": index, "text": text, "finish_reason": reason, **fields}
    return event({"choices": [choice]})


def said(*texts: str, reason: str = "stop", n: int = 1) -> list[bytes]:
    """All frames of a stream."""
    frames = [chunk(text, index=index) for text in texts for index in range(n)]
    frames += [chunk(reason=reason, index=index) for index in range(n)]
    return [*frames, event({"choices": [], "usage": USAGE}), DONE]


class Frames(httpx2.AsyncByteStream):
    """Frames that come one by one; an exception among them is raised."""

    def __init__(self, *frames: bytes | Exception | Callable[[], Any]) -> None:
        self._frames = frames

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for frame in self._frames:
            if isinstance(frame, Exception):
                raise frame
            if isinstance(frame, bytes):
                yield frame
            else:
                await frame()


def stream(*frames) -> httpx2.Response:
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return httpx2.Response(200, stream=Frames(*frames), headers=headers)


def refusal(status: int, headers=None, **error) -> httpx2.Response:
    body = {"error": {"message": "no", "type": None, "code": None} | error}
    return httpx2.Response(status, json=body, headers=headers)


class Stub(httpx2.AsyncBaseTransport):
    """
    Answers with one of *replies* after the other, the last one for ever.

    An exception among them is raised, as a connection does that breaks.
    """

    def __init__(self, *replies: Any) -> None:
        self._replies = [*replies]
        self.requests: list[tuple[str, Any, httpx2.Headers]] = []

    @property
    def bodies(self) -> list[Any]:
        return [body for _, body, _ in self.requests]

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/health"):
            return httpx2.Response(200, json={"status": "ok"})
        body = json.loads(await request.aread())
        self.requests.append((request.url.path, body, request.headers))
        has_many = len(self._replies) > 1
        reply = self._replies.pop(0) if has_many else self._replies[0]
        answer = reply(body) if callable(reply) else reply
        if isinstance(answer, Exception):
            raise answer
        return answer


def honest(body: Any) -> httpx2.Response:
    """Two words, or as many as are allowed."""
    if "input" in body:
        texts = body["input"]
        rows = [{"index": i, "embedding": [len(t), 1]} for i, t in enumerate(texts)]
        return httpx2.Response(200, json={"data": rows[::-1], "usage": USAGE})
    max_tokens = body.get("max_tokens", body.get("max_completion_tokens", 128))
    texts = ("hello ", "world")[:max_tokens]
    frames = said(
        *texts, reason="length" if max_tokens < 2 else "stop", n=body.get("n", 1)
    )
    usage = USAGE | {"completion_tokens": len(texts)}
    frames[-2] = event({"choices": [], "usage": usage})
    if body.get("logprobs"):
        top = {"hello ": -0.5, "x": -2.0}
        listed = {"tokens": ["hello "], "token_logprobs": [-0.5], "top_logprobs": [top]}
        frames[0] = chunk("hello ", logprobs=listed)
    if body.get("response_format"):
        frames[:-3] = [chunk("7")]
    if "messages" in body:
        frames = [_of_chat(frame) for frame in frames]
    return stream(*frames)


def _of_chat(frame: bytes) -> bytes:
    if frame == DONE:
        return frame
    fields = json.loads(frame.removeprefix(b"data: "))
    for choice in fields["choices"]:
        choice["delta"] = {"content": choice.pop("text")}
    return event(fields)


def runner_of(*replies, **options) -> RemoteRunner:
    """A runner of a service that answers with *replies*, one after the other."""
    options = {"backoff": AT_ONCE} | options
    return RemoteRunner("http://a", "m", transport=Stub(*replies), **options)


def stub_of(runner: RemoteRunner) -> Stub:
    """What stands for the service of *runner*."""
    return runner._client._transport


async def answer_of(runner: RemoteRunner, prompt="a", params=None, **options) -> Result:
    """The whole answer to one request; *runner* is closed then."""
    async with runner:
        return await runner.generate(prompt, params, **options).collect()
