"""`/v1/messages`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from pyllama_raw.serve.answer import TextAnswer
from pyllama_raw.serve.failures import STREAMED
from pyllama_raw.serve.json import JSON
from pyllama_raw.serve.messages.body import MessagesBody
from pyllama_raw.serve.messages.codec import MessagesCodec
from pyllama_raw.serve.service import Service


def routes(service: Service) -> APIRouter:
    """Endpoints of messages."""
    router = APIRouter(tags=["messages"], responses=STREAMED)

    @router.post("/v1/messages")
    async def messages(body: MessagesBody) -> Response:
        """Go on with a chat of messages that are made of blocks."""
        asked = await body.asked(service)
        return TextAnswer(service, asked, MessagesCodec(asked))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        asked = await body.asked(service)
        return JSON({"input_tokens": await asked.count()})

    return router
