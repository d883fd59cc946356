"""
A tokenizer and a template over HTTP, in the words of llama-server and of vLLM.

`content` in, `tokens` out are llama-server's words; `prompt`, `count` and `max_model_len`
are vLLM's. An answer has both.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import FastAPI
from starlette.responses import Response

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import fields
from pyllama_raw.serve.body import Body, Items
from pyllama_raw.serve.conversation import SentMessage
from pyllama_raw.serve.facts import template_of
from pyllama_raw.serve.failures import JSON, refused
from pyllama_raw.serve.llamacpp import Mixed, n_texts
from pyllama_raw.serve.openai import ChatBody, read_chat
from pyllama_raw.serve.service import Service

# Fields of a chat that is to become tokens.
OF_CHATS = {
    "model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt",
}  # fmt: skip
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


class TokenizeBody(Body):
    """A text or a chat that is to become tokens."""

    rules: ClassVar[fields.Rules] = fields.TOKENS

    content: str | Mixed | None = None
    """A text, or texts and token ids, one behind the other."""
    prompt: str | None = None
    messages: Items[SentMessage] | None = None
    add_special: bool | None = None
    """Whether tokens that begin or end a prompt are added."""
    add_special_tokens: bool | None = None
    parse_special: bool = True
    """Whether control tokens that are spelled in a text are understood."""
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """Whether the template of a chat asks for an answer, unless one has begun."""
    return_token_strs: bool = False
    """Whether the texts of the tokens come, too, as a list of their own."""
    with_pieces: bool = False
    """Whether each token comes with its text, or its bytes if these are no text."""


class DetokenizeBody(Body):
    """Tokens that are to become text."""

    rules: ClassVar[fields.Rules] = fields.TOKENS

    tokens: Items[int]
    skip_special_tokens: bool = False
    """Whether control tokens are left out."""


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeBody) -> Response:
        """Make tokens of a text, or of a chat."""
        engine = service.named(body.model).engine
        if isinstance(body.content, list):
            service.check_texts("content", n_texts([body.content]))
        # A chat goes through the template, as one that is to be answered.
        if body.messages is None:
            tokens = await _tokens(engine, body)
        elif not body.messages:
            raise refused("messages", "give at least one message")
        else:
            chat = ChatBody.model_construct(**body.model_dump(include=OF_CHATS))
            request = await read_chat(chat, service)
            engine = request.model.engine
            tokens = await engine.tokenize(request.prompts[0], **request.of_chat)
        answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
        has_pieces = body.with_pieces or body.return_token_strs
        pieces = await engine.pieces(tokens) if has_pieces else []
        # llama-server tells each token with its text, vLLM has the texts in a list.
        if body.with_pieces:
            answer["tokens"] = [
                {"id": id_, "piece": _text_or_bytes(piece)}
                for id_, piece in zip(tokens, pieces, strict=True)
            ]
        if body.return_token_strs:
            answer["token_strs"] = [piece.decode(errors="replace") for piece in pieces]
        return JSON(answer | {"max_model_len": engine.n_ctx_slot})

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeBody) -> Response:
        """Make text of tokens."""
        engine = service.named(body.model).engine
        special = not body.skip_special_tokens
        text = await engine.detokenize(body.tokens, special=special)
        return JSON({"content": text, "prompt": text})

    @app.get("/tokenizer_info", tags=["tokens"])
    async def tokenizer_info(model: str | None = None) -> Response:
        """Tokens that have a role, and the chat template that chats have."""
        engine = service.named(model).engine
        metadata = engine.info.metadata
        answer: dict[str, Any] = {"chat_template": template_of(engine) or None}
        # The file names tokens by their ids; a role may have none.
        for role, key in ROLES.items():
            token = metadata.get(f"tokenizer.ggml.{key}_token_id", "")
            ids = [int(token)] if token.isdecimal() else []
            if not all(id_ < engine.info.vocab.n_tokens for id_ in ids):
                ids = []  # some files have 4294967295 for none
            text = await engine.detokenize(ids, special=True)
            answer[f"{role}_token"] = text or None
        return JSON(answer)

    @app.post("/v1/chat/completions/render", tags=["tokens"])
    @app.post("/apply-template", tags=["tokens"])
    async def render(body: ChatBody) -> Response:
        """The prompt that the chat template makes of a chat, which is sent as for an answer."""
        request = await read_chat(body, service)
        messages: Any = request.prompts[0]
        prompt = await request.model.engine.render(messages, **request.of_chat)
        return JSON({"prompt": prompt})


async def _tokens(engine: AsyncEngine, body: TokenizeBody) -> list[int]:
    """Unless it is told, llama-server adds nothing to a text, and vLLM what begins prompts."""
    text = body.content if body.content is not None else body.prompt
    if text is None:
        raise refused("content", "give a text, or prompt or messages instead")
    flags = body.add_special, body.add_special_tokens, body.content is None
    adds = next(flag for flag in flags if flag is not None)
    if isinstance(text, str):
        text = [text]
    tokens: list[int] = []
    # What begins prompts is added to a text in front only, as llama-server does.
    for at, part in enumerate(text):
        if isinstance(part, int):
            tokens.append(part)
            continue
        special = body.parse_special
        tokens += await engine.tokenize(
            part, add_special=adds and not at, parse_special=special
        )
    return tokens


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
