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
from pyllama_raw.serve.body import TextBody, template_variables
from pyllama_raw.serve.failures import STREAMED, refused
from pyllama_raw.serve.json import JSON
from pyllama_raw.serve.openai.chunks import Chunks, reason_of
from pyllama_raw.serve.openai.logprobs import chat_logprobs
from pyllama_raw.serve.openai.messages import ChatMessage, take_media
from pyllama_raw.serve.service import Service

_OF_MESSAGES = ("prompt", "content", "role", "chat messages", "images", "sounds")
NAMES = {  # of fields, by what the engine calls them
    **dict.fromkeys(_OF_MESSAGES, "messages"),
    "tools": "tools",
    "template_kwargs": "chat_template_kwargs",
}


class ChatBody(TextBody):
    """A chat that is to go on."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    """Messages; an answer that has begun may be the last one, and goes on."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Whether each token has its log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likely tokens that are listed with each token, if there are logprobs."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the template tells the model of."""
    tool_choice: str | dict[str, Any] | None = None
    """"auto" or "none": whether the model is told of the tools."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the template asks for an answer, which it does unless one has begun."""
    continue_final_message: bool | None = None
    """Whether the last message is to go on, which is so if it is the assistant's."""

    verbose: bool = False
    """Whether a whole answer tells the prompt as the model gets it, in `__verbose`."""

    async def asked(self, service: Service) -> Asked:
        """As the engine takes it; raises Failure and InvalidSampling."""
        found = service.find(self.model, Operation.GENERATE)
        self._check()
        options = self.options(found, service.config)
        if self.tools and self.tool_choice != "none":
            options["tools"] = self.tools
        options["template_kwargs"] = template_variables(
            self.chat_template_kwargs, self.add_generation_prompt
        )
        more: dict[str, Any] = {}
        names = self.names | NAMES
        if self.max_completion_tokens is not None:
            more["max_tokens"] = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        params = self.params(found, service.config, **more)
        media = await take_media(self.messages, found.engine, service.config)
        chat, streams = self.messages, bool(self.stream)
        return Asked(found, (chat,), params, options, streams, names, media)

    def _check(self) -> None:
        """Raise Failure if something is asked for that is not done."""
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "it needs logprobs: true")
        if self.tool_choice not in (None, "auto", "none"):
            reason = 'give "auto" or "none": calls that must be made come later'
            raise refused("tool_choice", reason, "unsupported")
        last = self.messages[-1]
        has_begun = last["role"] == "assistant" and bool(last.get("content"))
        if self.continue_final_message not in (None, has_begun):
            reason = "the last message goes on if it is the assistant's"
            raise refused("continue_final_message", reason, "unsupported")
        if self.add_generation_prompt and has_begun:
            reason = "the assistant has begun an answer, which goes on"
            raise refused("add_generation_prompt", reason, "unsupported")


class ChatCodec(Chunks):
    """Writes the answer to a chat."""

    def __init__(self, asked: Asked, body: ChatBody) -> None:
        kind = "chat.completion.chunk" if asked.streams else "chat.completion"
        super().__init__("chatcmpl", kind, asked, with_usage=body.wants_usage)
        self._lists = asked.params.logprobs is not None
        self.prompt: str | None = None  # that a whole answer tells

    def begin(self) -> bytes:
        """The role of each output."""
        choice = b'"delta":{"role":"assistant","content":null},"finish_reason":null'
        return b"".join(self.frame(index, choice) for index in range(self._n))

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """The new text."""
        text, logprobs = to_json(delta.text), b""
        if self._lists:
            logprobs = b'"logprobs":%b,' % to_json(chat_logprobs(delta.logprobs))
        choice = b'"delta":{"content":%b},%b"finish_reason":null' % (text, logprobs)
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
                "logprobs": chat_logprobs(result.logprobs) if self._lists else None,
                **reason_of(result),
            }
            for result in results[0]
        ]
        told = self.answer(choices, results)
        return (
            told
            if self.prompt is None
            else told | {"__verbose": {"prompt": self.prompt}}
        )


def routes(service: Service) -> APIRouter:
    """Endpoints of chats."""
    router = APIRouter(tags=["chat"], responses=STREAMED)

    @router.post("/v1/chat/completions")
    @router.post("/chat/completions", include_in_schema=False)
    async def chat(body: ChatBody) -> Response:
        """Go on with a chat."""
        asked = await body.asked(service)
        codec = ChatCodec(asked, body)
        if body.verbose:
            codec.prompt = await asked.shown()
        return TextAnswer(service, asked, codec)

    @router.post("/v1/chat/completions/input_tokens")
    @router.post("/chat/completions/input_tokens", include_in_schema=False)
    async def input_tokens(body: ChatBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        asked = await body.asked(service)
        told = {"object": "response.input_tokens", "input_tokens": await asked.count()}
        return JSON(told)

    return router
