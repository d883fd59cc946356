"""`/v1/embeddings` and `/v1/rerank`: texts to vectors and ranks."""

from __future__ import annotations

from base64 import b64encode
from math import exp
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import FastAPI
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw import AsyncEngine
from pyllama_raw.errors import InvalidRequest, PromptTooLong, TextTooLong
from pyllama_raw.results import Operation, Pooling, Ranked
from pyllama_raw.serve import fields
from pyllama_raw.serve.body import Items, ServedBody
from pyllama_raw.serve.failures import JSON, refused
from pyllama_raw.serve.llamacpp import (
    Prompts,
    TextObject,
    n_texts,
    prompts_of,
    tokens_of,
)
from pyllama_raw.serve.service import ServedModel, Service

Word = Literal["mean", "cls", "last"]
Text = str | list[int]
LEFT = ("left", "Left")
MOST_CHARACTERS = 32  # of a token of a document that is cut off


class EmbeddingBody(ServedBody):
    """Texts that are to become vectors."""

    rules: ClassVar[fields.Rules] = fields.VECTORS
    need: ClassVar[Operation | None] = Operation.EMBED

    input: Annotated[Prompts, Field(validation_alias=AliasChoices("input", "content"))]
    """A text, token ids, both mixed, or a list of these; llama.cpp names it content, too."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64 is of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Only the first ones of each vector."""
    pooling: Literal["mean", "cls", "last"] | None = None
    """How the vectors of tokens become one; left out: as the service or the model says."""
    normalize: bool | None = None
    """Whether vectors are made as long as 1, which they are unless this is false."""
    embd_normalize: Annotated[int, Field(ge=-1, le=64)] | None = None
    """llama.cpp's norm: -1 none, 0 the largest number becomes 32760, 2 length, p the p-norm."""
    add_special_tokens: bool | None = None
    """Whether tokens that begin and end a text are added, which they are unless this is false."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """Most tokens of a text, the rest is cut off; -1: as many as the model takes."""
    truncate: bool | Literal["NONE", "START", "END"] | None = None
    """Whether a text that is too long is cut off, at its end, or at its START."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a text is cut off: at its end, which is right, or at its start."""

    @property
    def limit(self) -> int | None:
        """Most tokens of a text; -1: as many as the model takes, None: no text is cut."""
        if self.truncate_prompt_tokens is not None:
            return self.truncate_prompt_tokens
        return -1 if self.truncate not in (None, False, "NONE") else None


class RerankBody(ServedBody):
    """Documents that are to be ranked by how they answer a query."""

    rules: ClassVar[fields.Rules] = fields.RANKS
    need: ClassVar[Operation | None] = Operation.RANK

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
    truncate: Annotated[
        bool | Literal["NONE", "START", "END"] | None,
        Field(validation_alias=AliasChoices("truncate", "truncation")),
    ] = None
    """Whether a document that is too long is cut off, at its end unless it says otherwise."""
    truncation_direction: Annotated[
        str | None,
        Field(validation_alias=AliasChoices("truncation_direction", "truncation_side")),
    ] = None
    """"left": a document is cut off at its start."""
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a document, the rest is cut off; Cohere's word."""
    raw_scores: bool | None = None
    """Whether scores stay as the model gives them, which they do unless this is false."""
    use_activation: bool | None = None
    """vLLM's word for the opposite: whether scores become numbers between 0 and 1."""

    @property
    def wants_list(self) -> bool:
        """Whether the client reads a list, as servers of its field names answer."""
        return self.texts is not None or "rid" in self.model_fields_set


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/embedding", tags=["vectors"])
    async def own_embedding(body: EmbeddingBody, request: Request) -> Response:
        """Make a vector of each text, in the form of llama-server."""
        return JSON(await own_form(body, request))

    @app.post("/v1/embeddings", tags=["vectors"])
    @app.post("/embeddings", include_in_schema=False)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Make a vector of each text."""
        # llama-server has its own form at its path.
        if service.is_llama and request.url.path == "/embeddings":
            return JSON(await own_form(body, request))
        model, options = begin(body, request)
        pooling = body.pooling or _pooling(model, service)
        if pooling == "none":
            reason = (
                "pooling none is not OpenAI compatible: ask /embedding, or give one"
            )
            raise refused("pooling", reason, "unsupported")
        return JSON(await _embedded(model, body, pooling, options))

    def begin(
        body: EmbeddingBody, request: Request
    ) -> tuple[ServedModel, dict[str, Any]]:
        """The model of a request, and its options. Raises Failure."""
        model = service.find(body.model, Operation.EMBED)
        service.check_texts("input", n_texts(prompts_of(body.input, "input")))
        exchange = request.state.exchange
        exchange.model = model.name
        return model, service.options_of(exchange, body.served(service))

    async def own_form(body: EmbeddingBody, request: Request) -> list[dict[str, Any]]:
        """Vectors in the form of llama-server, which may have one for each token."""
        model, options = begin(body, request)
        pooling = body.pooling or _pooling(model, service)
        if pooling != "none":
            answer = await _embedded(model, body, pooling, options)
            rows = [[entry["embedding"]] for entry in answer["data"]]
        else:
            prompts = prompts_of(body.input, "input")
            texts = [await _embeddable(model.engine, body, p) for p in prompts]
            of_texts = await model.engine.embed_tokens(
                texts, body.dimensions, normalize=False, **options
            )
            rows = [vectors.tolist() for vectors in of_texts]
        return [{"index": i, "embedding": row} for i, row in enumerate(rows)]

    @app.post("/v1/rerank", tags=["vectors"])
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/reranking", include_in_schema=False)
    @app.post("/v1/reranking", include_in_schema=False)
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Rank documents by how they answer a query, the best first."""
        model = service.find(body.model, Operation.RANK)
        service.check_texts("documents", len(body.texts or body.documents))
        exchange = request.state.exchange
        options = service.options_of(exchange, body.served(service))
        exchange.model = model.name
        return JSON(await _ranked(model, body, options))


def _pooling(model: ServedModel, service: Service) -> Word | Literal["none"] | None:
    """The pooling of a request that names none; None: as the file of the model states."""
    stated, usual = model.engine.capabilities.model.pooling, service.config.pooling
    if usual is None and stated is Pooling.RANK:
        reason = 'the model ranks: ask /v1/rerank, or give "mean", "cls" or "last"'
        raise refused("model", reason, "unsupported")
    # llama.cpp and sentence-transformers, too, take the mean where nobody says otherwise.
    return usual or ("mean" if stated in (None, Pooling.NONE) else None)


async def _embedded(
    model: ServedModel,
    body: EmbeddingBody,
    pooling: Word | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    engine = model.engine
    texts = [
        await _embeddable(engine, body, p) for p in prompts_of(body.input, "input")
    ]
    # The engine makes vectors as long as 1. Other norms are made here, of what the model computes.
    norm = body.embd_normalize
    is_own = norm is None or norm == 2  # else the numbers as the model makes them
    normalize = is_own and body.normalize is not False
    try:
        rows = await engine.embed(texts, body.dimensions, normalize, pooling, **options)
    except TextTooLong as error:
        # The engine knows how many tokens a text may have.
        if body.limit != -1:
            raise
        limit = error.max_tokens
        texts = [await _cut(engine, body, text, limit) for text in texts]
        rows = await engine.embed(texts, body.dimensions, normalize, pooling, **options)
    if norm is not None and not is_own:
        rows = _normed(rows, norm)
    n_tokens = rows.usage.prompt_tokens
    data = [
        {"object": "embedding", "index": index, "embedding": _written(row, body)}
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {
        "object": "list",
        "model": body.model or model.name,
        "data": data,
        "usage": usage,
    }


async def _embeddable(engine: AsyncEngine, body: EmbeddingBody, prompt: Any) -> Text:
    """A text, or the token ids of one that the engine would not make by itself."""
    text = prompt.text if isinstance(prompt, TextObject) else prompt
    # Texts and token ids that are mixed become tokens.
    if isinstance(text, list) and any(isinstance(item, str) for item in text):
        text = await tokens_of(engine, text)
    if body.limit is not None and body.limit >= 0:
        return await _cut(engine, body, text, body.limit)
    if isinstance(text, str) and body.add_special_tokens is False:
        return await _tokens(engine, text, adds=False)
    tokens_or_text: Text = text
    return tokens_or_text


async def _cut(
    engine: AsyncEngine, body: EmbeddingBody, text: Text, max_tokens: int
) -> list[int]:
    """
    At most *max_tokens* tokens of *text*; those that begin and end every text stay.

    Raises:
        Failure: they leave no room.
    """
    begin: list[int] = []
    end: list[int] = []
    # Token ids are all of a text. Of others, what begins and ends each is known by a short text.
    if not isinstance(text, str):
        inner = [*text]
    else:
        inner = await _tokens(engine, text, adds=False)
        if body.add_special_tokens is not False:
            # What is added does not depend on the text.
            alone = await _tokens(engine, "a", adds=False)
            framed = await _tokens(engine, "a", adds=True)
            n = len(alone)
            places = (i for i in range(len(framed)) if framed[i : i + n] == alone)
            at = next(places, 0)
            begin, end = framed[:at], framed[at + n :]
    n_inner = max_tokens - len(begin) - len(end)
    if n_inner < 1:
        reason = (
            f"give at least {len(begin) + len(end) + 1}, because a text needs tokens"
        )
        raise refused("truncate_prompt_tokens", reason)
    is_left = body.truncation_side == "left" or body.truncate == "START"
    inner = inner[-n_inner:] if is_left else inner[:n_inner]
    return [*begin, *inner, *end]


async def _tokens(engine: AsyncEngine, text: str, *, adds: bool) -> list[int]:
    """Tokens of a text, or of parts of one that is longer than a prompt may be."""
    try:
        return await engine.tokenize(text, add_special=adds, parse_special=False)
    except PromptTooLong:
        middle = len(text) // 2
        parts = [text[:middle], text[middle:]]
    return [t for part in parts for t in await _tokens(engine, part, adds=False)]


def _normed(rows: Any, norm: int) -> Any:
    """*rows* by the norm of llama.cpp's number; those of zeros stay so."""
    if norm < 0:
        return rows
    lengths = np.abs(rows).max(axis=1, keepdims=True)
    if norm == 0:
        lengths = lengths / 32760
    else:  # by the largest number first, because powers of others leave a float's range
        parts = np.divide(rows, lengths, out=rows.copy(), where=lengths > 0)
        lengths = lengths * np.linalg.norm(parts, norm, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=rows.copy(), where=lengths > 0)


def _written(row: Any, body: EmbeddingBody) -> Any:
    if body.encoding_format == "base64":
        return b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode()
    return row.tolist()


async def _ranked(model: ServedModel, body: RerankBody, options: dict[str, Any]) -> Any:
    documents = [_text(document) for document in (body.texts or body.documents)]
    if not documents:
        raise refused("documents", "give at least one")
    rank, limit = model.engine.rank, body.max_tokens_per_doc
    texts = documents
    if limit is not None:
        texts = [await _beginning(model.engine, body, d, limit) for d in documents]
    try:
        ranked = await rank(body.query, texts, **options)
    except TextTooLong as error:
        cuts = limit is not None or body.truncate not in (None, False, "NONE")
        if not cuts or not error.name.startswith("documents"):
            raise
        # What the model gets beside a document is known by a short one.
        [short] = await rank(body.query, ["a"], **options)
        n_most = error.max_tokens - short.n_tokens
        if n_most < 1:
            raise
        texts = [await _beginning(model.engine, body, d, n_most) for d in texts]
        ranked = await rank(body.query, texts, **options)
    results = [_result(rank, documents, body) for rank in ranked[: body.top_n]]
    if body.wants_list:
        return results
    n_tokens = sum(rank.n_tokens for rank in ranked)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "model": model.name, "results": results, "usage": usage}


async def _beginning(
    engine: AsyncEngine, body: RerankBody, document: str, n_most: int
) -> str:
    """At most *n_most* tokens of *document*: its beginning, or its end if the body says so."""
    is_left = body.truncate == "START" or (body.truncation_direction or "") in LEFT
    # Nobody looks at all of a long text for the few tokens that stay.
    n_characters = MOST_CHARACTERS * n_most
    text = document[-n_characters:] if is_left else document[:n_characters]
    # A part has the tokens, too, that begin and end each text.
    n_tokens: int | None = n_most + len(await engine.tokenize("", parse_special=False))
    try:
        parts = await engine.chunks(text, n_tokens) if text else []
    except InvalidRequest:  # the model takes fewer
        n_tokens = None
        parts = await engine.chunks(text)
    if len(parts) < 2:
        return text
    if not is_left:
        return parts[0]
    # Parts are counted from the start, so the last one may be short. As many characters as the first
    # one has are about as many tokens.
    n_characters = len(parts[0])
    while len(await engine.chunks(text[-n_characters:], n_tokens)) > 1:
        n_characters = n_characters * 3 // 4
    return text[-n_characters:]


def _result(rank: Ranked, documents: list[str], body: RerankBody) -> dict[str, Any]:
    text = documents[rank.index]
    score = "score" if body.wants_list else "relevance_score"
    value = rank.score
    # Two servers have two words for a number between 0 and 1.
    if body.raw_scores is False or body.use_activation:
        value = 1 / (1 + exp(-min(max(value, -700.0), 700.0)))
    result: dict[str, Any] = {"index": rank.index, score: value}
    # A list of texts is that of text-embeddings-inference, and one of documents that of SGLang.
    if body.return_documents and body.texts is not None:
        result["text"] = text
    elif body.return_documents:
        result["document"] = text if body.wants_list else {"text": text}
    return result


def _text(document: str | dict[str, Any]) -> str:
    """Raises Failure if an object has no text."""
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise refused("documents", "give texts, or objects with a text")
    return text
