"""`/v1/responses`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from pyllama_raw.serve.answer import TextAnswer
from pyllama_raw.serve.failures import STREAMED
from pyllama_raw.serve.json import JSON
from pyllama_raw.serve.responses.body import ResponsesBody
from pyllama_raw.serve.responses.codec import ResponsesCodec
from pyllama_raw.serve.service import Service


def routes(service: Service) -> APIRouter:
    """Endpoints of responses."""
    router = APIRouter(tags=["responses"], responses=STREAMED)

    @router.post("/v1/responses")
    @router.post("/responses", include_in_schema=False)
    async def responses(body: ResponsesBody) -> Response:
        """Go on with a chat of items."""
        asked = await body.asked(service)
        return TextAnswer(service, asked, ResponsesCodec(asked, body))

    @router.post("/v1/responses/input_tokens")
    @router.post("/responses/input_tokens", include_in_schema=False)
    async def input_tokens(body: ResponsesBody) -> Response:
        """Count the tokens that a chat has as a prompt."""
        asked = await body.asked(service)
        told = {"object": "response.input_tokens", "input_tokens": await asked.count()}
        return JSON(told)

    return router
