"""Endpoints that answer with text, in all dialects."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from pyllama_raw.serve.answer import TextAnswer
from pyllama_raw.serve.chats import ConversationBody
from pyllama_raw.serve.failures import JSON
from pyllama_raw.serve.messages.body import MessagesBody
from pyllama_raw.serve.messages.codec import MessagesCodec
from pyllama_raw.serve.native.body import NativeBody, NativeCompletionBody
from pyllama_raw.serve.native.codec import NativeCodec
from pyllama_raw.serve.native.fill import InfillBody
from pyllama_raw.serve.openai.chat import ChatBody, ChatCodec
from pyllama_raw.serve.openai.completions import CompletionBody, CompletionCodec
from pyllama_raw.serve.responses.body import ResponsesBody
from pyllama_raw.serve.responses.codec import ResponsesCodec
from pyllama_raw.serve.service import Service

STREAMED: dict[int | str, dict[str, Any]] = {  # of endpoints that answer either way
    200: {"content": {"text/event-stream": {}}}
}


def openai_routes(app: FastAPI, service: Service) -> None:
    """Add endpoints of OpenAI's API."""

    @app.post("/v1/chat/completions", tags=["chat"], responses=STREAMED)
    @app.post("/chat/completions", include_in_schema=False)
    async def chat(body: ChatBody) -> Response:
        """Go on with a chat."""
        asked = await body.asked(service)
        prompt = (await asked.shown())[0] if body.verbose else None
        has_alias = service.config.reasoning_alias
        codec = ChatCodec(asked, body, prompt, has_alias=has_alias)
        return TextAnswer(service, asked, codec)

    @app.post("/v1/chat/completions/input_tokens", tags=["chat"])
    @app.post("/chat/completions/input_tokens", include_in_schema=False)
    async def chat_tokens(body: ChatBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        return JSON(await _counted(service, body))

    @app.post("/v1/completions", tags=["completions"], responses=STREAMED)
    async def completions(body: CompletionBody) -> Response:
        """Go on with texts."""
        asked, echoes = await body.asked(service)
        return TextAnswer(service, asked, CompletionCodec(asked, body, echoes))


def agent_routes(app: FastAPI, service: Service) -> None:
    """Add endpoints of dialects for agents."""

    @app.post("/v1/responses", tags=["responses"], responses=STREAMED)
    @app.post("/responses", include_in_schema=False)
    async def responses(body: ResponsesBody) -> Response:
        """Go on with a chat of items."""
        asked = await body.asked(service)
        return TextAnswer(service, asked, ResponsesCodec(asked, body))

    @app.post("/v1/responses/input_tokens", tags=["responses"])
    @app.post("/responses/input_tokens", include_in_schema=False)
    async def response_tokens(body: ResponsesBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        return JSON(await _counted(service, body))

    @app.post("/v1/messages", tags=["messages"], responses=STREAMED)
    async def messages(body: MessagesBody) -> Response:
        """Go on with a chat of messages that are made of blocks."""
        asked = await body.asked(service)
        return TextAnswer(service, asked, MessagesCodec(asked))

    @app.post("/v1/messages/count_tokens", tags=["messages"])
    async def message_tokens(body: MessagesBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        asked = await body.asked(service)
        return JSON({"input_tokens": await asked.count()})


def native_routes(app: FastAPI, service: Service) -> None:
    """Add endpoints of llama.cpp's own dialect."""

    @app.post("/completion", tags=["native"], responses=STREAMED)
    @app.post("/completions", include_in_schema=False)
    async def completion(body: NativeCompletionBody) -> Response:
        """Go on with prompts, in the words of llama.cpp's server."""
        return await _native(service, body)

    @app.post("/infill", tags=["native"], responses=STREAMED)
    async def infill(body: InfillBody) -> Response:
        """Fill a gap in a text, with a model that has learnt it."""
        return await _native(service, body)


async def _counted(service: Service, body: ConversationBody) -> dict[str, Any]:
    asked = await body.asked(service)
    return {"object": "response.input_tokens", "input_tokens": await asked.count()}


async def _native(service: Service, body: NativeBody) -> Response:
    asked = await body.asked(service)
    return TextAnswer(service, asked, NativeCodec(asked, body, await asked.shown()))
