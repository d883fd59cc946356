"""
What clients ask of a tokenizer and a template, in the words of llama-server and of vLLM.

`content` in, `tokens` out are llama-server's words; `prompt`, `count` and `max_model_len`
are vLLM's. An answer has both.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from pyllama_raw import AsyncEngine
from pyllama_raw.results import Operation
from pyllama_raw.serve.body import Body, Items, template_variables
from pyllama_raw.serve.failures import JSON, refused
from pyllama_raw.serve.service import Service

ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


class TokenizeBody(Body):
    """A text or a chat that is to become tokens."""

    content: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special: bool | None = None
    """Whether tokens that begin or end a prompt are added."""
    add_special_tokens: bool | None = None
    with_pieces: bool = False
    """Whether each token comes with its text, or its bytes if these are no text."""


class DetokenizeBody(Body):
    """Tokens that are to become text."""

    tokens: Items[int]


class TemplateBody(Body):
    """A chat that is to become a prompt."""

    messages: Items[dict[str, Any]]
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """Whether the template asks for an answer, which it does unless one has begun."""


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeBody) -> Response:
        """Make tokens of a text, or of a chat."""
        engine = service.named(body.model).engine
        tokens = await _tokens(engine, body)
        told: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
        if body.with_pieces:
            pairs = zip(tokens, await engine.pieces(tokens), strict=True)
            told["tokens"] = [
                {"id": id_, "piece": _shown(piece)} for id_, piece in pairs
            ]
        return JSON(told | {"max_model_len": engine.n_ctx_slot})

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeBody) -> Response:
        """Make text of tokens."""
        engine = service.named(body.model).engine
        text = await engine.detokenize(body.tokens, special=True)
        return JSON({"content": text, "prompt": text})

    @app.get("/tokenizer_info", tags=["tokens"])
    async def tokenizer_info() -> Response:
        """Tokens that have a role, and the chat template."""
        engine = service.named(None).engine
        return JSON(await _described(engine))

    @app.post("/v1/chat/completions/render", tags=["tokens"])
    @app.post("/apply-template", tags=["tokens"])
    async def render(body: TemplateBody) -> Response:
        """The prompt that the chat template makes."""
        found = service.find(body.model, Operation.GENERATE)
        variables, asks = body.chat_template_kwargs, body.add_generation_prompt
        options: Any = {"template_kwargs": template_variables(variables, asks)}
        if body.tools:
            options["tools"] = body.tools
        prompt = await found.engine.render(body.messages, **options)
        return JSON({"prompt": prompt})


async def _tokens(engine: AsyncEngine, body: TokenizeBody) -> list[int]:
    """Unless it is told, llama-server adds nothing to a text, and vLLM what begins prompts."""
    if body.messages is not None:
        return await engine.tokenize(body.messages)
    text = body.content if body.content is not None else body.prompt
    if text is None:
        raise refused("content", "give a text, or prompt or messages instead")
    told = body.add_special, body.add_special_tokens, body.content is None
    adds = next(each for each in told if each is not None)
    return await engine.tokenize(text, add_special=adds)


def _shown(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def _described(engine: AsyncEngine) -> dict[str, Any]:
    metadata = engine.info.metadata
    told: dict[str, Any] = {"chat_template": metadata.get("tokenizer.chat_template")}
    for role, key in ROLES.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id", "")
        ids = [int(token)] if token.isdecimal() else []
        text = await engine.detokenize(ids, special=True)
        told[f"{role}_token"] = text or None
    return told
