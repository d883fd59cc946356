"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import Response

from pyllama_raw import Delta, Result
from pyllama_raw.results import Operation
from pyllama_raw.serve.answer import TextAnswer
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.body import TextBody
from pyllama_raw.serve.openai.chunks import Chunks, reason_of, usage
from pyllama_raw.serve.service import Service


class ChatBody(TextBody):
    """A chat that is to go on."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    """The newer name of max_tokens."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the template tells the model of."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables of the chat template."""

    def asked(self, service: Service) -> Asked:
        """As the engine takes it; raises Failure and InvalidSampling."""
        found = service.find(self.model, Operation.GENERATE)
        options = self.options(found, service.config)
        if self.tools:
            options["tools"] = self.tools
        if self.chat_template_kwargs:
            options["template_kwargs"] = self.chat_template_kwargs
        more: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            more["max_tokens"] = self.max_completion_tokens
        params = self.params(found, **more)
        return Asked(found, (self.messages,), params, options, bool(self.stream))


class ChatCodec(Chunks):
    """Writes the answer to a chat."""

    def __init__(self, asked: Asked, *, with_usage: bool) -> None:
        kind = "chat.completion.chunk" if asked.streams else "chat.completion"
        name = asked.found.name
        super().__init__("chatcmpl", kind, name, with_usage=with_usage)
        self._n = asked.params.n

    def begin(self) -> bytes:
        """The role of each output."""
        choice = b'"delta":{"role":"assistant","content":""},"finish_reason":null'
        return b"".join(self.frame(index, choice) for index in range(self._n))

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """The new text."""
        text = to_json(delta.text)
        choice = b'"delta":{"content":%b},"finish_reason":null' % text
        return self.frame(delta.index, choice)

    def ended(self, prompt: int, result: Result) -> bytes:  # noqa: ARG002
        """Why an output ended."""
        choice = b'"delta":{},' + to_json(reason_of(result))[1:-1]
        return self.frame(result.index, choice)

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The answer at once."""
        choices = [
            {
                "index": result.index,
                "message": {
                    "role": "assistant",
                    "content": result.text,
                    "refusal": None,
                },
                "logprobs": None,
                **reason_of(result),
            }
            for result in results[0]
        ]
        return self.head | {"choices": choices, "usage": usage(results)}


def routes(service: Service) -> APIRouter:
    """Endpoints of chats."""
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions")
    @router.post("/chat/completions", include_in_schema=False)
    async def chat(body: ChatBody) -> Response:
        """Go on with a chat."""
        asked = body.asked(service)
        return TextAnswer(service, asked, ChatCodec(asked, with_usage=body.with_usage))

    return router
