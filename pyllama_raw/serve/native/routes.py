"""`/completion` and `/infill`."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from pyllama_raw.results import Operation
from pyllama_raw.serve.answer import TextAnswer
from pyllama_raw.serve.failures import STREAMED
from pyllama_raw.serve.native.body import NativeBody
from pyllama_raw.serve.native.codec import NativeCodec
from pyllama_raw.serve.native.fill import ExtraFile, fill_prompt
from pyllama_raw.serve.native.prompts import Prompts, ReadPrompt, read_prompts
from pyllama_raw.serve.service import Found, Service


class NativeCompletionBody(NativeBody):
    """Prompts that are to go on."""

    prompt: Prompts
    """A text, token ids, both mixed, or a list of these."""


class InfillBody(NativeBody):
    """A gap in a text that is to be filled."""

    input_prefix: str
    """The text before the gap."""
    input_suffix: str
    """The text behind it."""
    prompt: str = ""
    """The text that the gap begins with."""
    input_extra: list[ExtraFile] = Field(default_factory=list)
    """Other texts, the most important one last."""


def routes(service: Service) -> APIRouter:
    """Endpoints of llama.cpp's own dialect."""
    router = APIRouter(tags=["native"], responses=STREAMED)

    @router.post("/completion")
    @router.post("/completions", include_in_schema=False)
    async def completion(body: NativeCompletionBody) -> Response:
        """Go on with prompts, in the words of llama.cpp's server."""
        found = service.find(body.model, Operation.GENERATE)
        prompts = await read_prompts(found.engine, body.prompt)
        return await _answer(service, found, body, prompts)

    @router.post("/infill")
    async def infill(body: InfillBody) -> Response:
        """Fill a gap in a text, with a model that has learnt it."""
        found = service.find(body.model, Operation.GENERATE)
        n_output = body.n_most
        if n_output is None:
            quarter = found.engine.n_ctx_slot // 4
            n_output = service.config.sampling.get("max_tokens", quarter)
        texts = (body.input_prefix + body.prompt, body.input_suffix)
        tokens = await fill_prompt(found.engine, texts, body.input_extra, n_output)
        prompts = [await ReadPrompt.of(found.engine, tokens)]
        return await _answer(service, found, body, prompts)

    return router


async def _answer(
    service: Service, found: Found, body: NativeBody, prompts: list[ReadPrompt]
) -> TextAnswer:
    asked = await body.asked(service, found, prompts)
    return TextAnswer(service, asked, NativeCodec(asked, prompts, body))
