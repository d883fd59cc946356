"""`/v1/embeddings` and `/v1/rerank`: texts to vectors and ranks."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw import AsyncEngine
from pyllama_raw.results import Operation, Ranked
from pyllama_raw.serve.answer import computed
from pyllama_raw.serve.body import Items, ServedBody
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.native.prompts import (
    Prompts,
    TextObject,
    n_texts,
    prompts_of,
    tokens_of,
)
from pyllama_raw.serve.service import Found, Service


class EmbeddingBody(ServedBody):
    """Texts that are to become vectors."""

    input: Annotated[Prompts, Field(validation_alias=AliasChoices("input", "content"))]
    """A text, token ids, both mixed, or a list of these; llama.cpp names it content, too."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64 is of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Only the first ones of each vector."""
    user: str | None = None


class RerankBody(ServedBody):
    """Documents that are to be ranked by how they answer a query."""

    query: str
    documents: Items[str | dict[str, Any]] = Field(default_factory=list)
    texts: Items[str] | None = None
    """Another name of documents; the answer is then a list."""
    rid: str | Items[str] | None = None
    """Of routers of vLLM and SGLang: the answer is a list wherever it is named."""
    top_n: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(validation_alias=AliasChoices("top_n", "top_k")),
    ] = None
    """Only the best ones; SGLang names it top_k."""
    return_documents: bool = False
    """Whether the answer repeats the documents."""

    @property
    def wants_list(self) -> bool:
        """Whether the client reads a list, as servers of its field names answer."""
        return self.texts is not None or "rid" in self.model_fields_set


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/v1/embeddings", tags=["vectors"])
    @app.post("/embeddings", include_in_schema=False)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Make a vector of each text."""
        found = service.find(body.model, Operation.EMBED)
        service.check_texts("input", n_texts(prompts_of(body.input, "input")))
        work = _embedded(found.engine, body, body.served(service.config))
        return await computed(service, found, request, work)

    @app.post("/v1/rerank", tags=["vectors"])
    @app.post("/rerank", include_in_schema=False)
    @app.post("/reranking", include_in_schema=False)
    @app.post("/v1/reranking", include_in_schema=False)
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Rank documents by how they answer a query, the best first."""
        found = service.find(body.model, Operation.RANK)
        service.check_texts("documents", len(body.texts or body.documents))
        work = _ranked(found, body, body.served(service.config))
        return await computed(service, found, request, work)


async def _embedded(
    engine: AsyncEngine, body: EmbeddingBody, options: dict[str, Any]
) -> dict[str, Any]:
    texts = [await _embeddable(engine, p) for p in prompts_of(body.input, "input")]
    rows = await engine.embed(texts, body.dimensions, **options)
    n_tokens = rows.usage.prompt_tokens
    data = [
        {"object": "embedding", "index": index, "embedding": _written(row, body)}
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {
        "object": "list",
        "model": body.model or engine.model_name,
        "data": data,
        "usage": usage,
    }


async def _embeddable(engine: AsyncEngine, given: Any) -> str | list[int]:
    if isinstance(given, TextObject):
        return given.text
    if isinstance(given, list) and any(isinstance(item, str) for item in given):
        return await tokens_of(engine, given)
    text_or_ids: str | list[int] = given
    return text_or_ids


def _written(row: Any, body: EmbeddingBody) -> Any:
    if body.encoding_format == "base64":
        return b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode()
    return row.tolist()


async def _ranked(found: Found, body: RerankBody, options: dict[str, Any]) -> Any:
    documents = [_text(each) for each in (body.texts or body.documents)]
    if not documents:
        raise refused("documents", "give at least one")
    ranked = await found.engine.rank(body.query, documents, **options)
    results = [_told(each, documents, body) for each in ranked[: body.top_n]]
    if body.wants_list:
        return results
    n_tokens = sum(each.n_tokens for each in ranked)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "model": found.name, "results": results, "usage": usage}


def _told(ranked: Ranked, documents: list[str], body: RerankBody) -> dict[str, Any]:
    text = documents[ranked.index]
    score = "score" if body.wants_list else "relevance_score"
    told: dict[str, Any] = {"index": ranked.index, score: ranked.score}
    if body.return_documents:
        told["document"] = text if body.wants_list else {"text": text}
    return told


def _text(document: str | dict[str, Any]) -> str:
    """Raises Failure if an object has no text."""
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise refused("documents", "give texts, or objects with a text")
    return text
