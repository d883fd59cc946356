"""
How likely a model finds texts, over HTTP: `/v1/score` and `/v1/classify`.

Two forms of scores: ours, of `continuations` of one prompt, and SGLang's, of `label_token_ids`
behind a query with each item. Classes are those of vLLM and SGLang, whose models have labels of
their own; a model that generates gets them from the body.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from math import exp
from time import time
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from uuid import uuid4

from anyio import create_task_group
from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw.api.batches import softmax
from pyllama_raw.errors import InvalidRequest, first_of
from pyllama_raw.results import LabelScore, Likelihood, Operation
from pyllama_raw.serve import fields
from pyllama_raw.serve.body import Items, Named, ServedBody, scales_of
from pyllama_raw.serve.conversation import template_variables
from pyllama_raw.serve.failures import JSON, refused, renamed
from pyllama_raw.serve.openai import LEAST, TokenIds
from pyllama_raw.serve.service import Exchange, ServedModel, Service

T = TypeVar("T")
Text = str | TokenIds

# Fields of /v1/score that one of its forms has alone: `label_token_ids` makes it SGLang's.
OURS = ("prompt", "continuations", "logprobs")
SGLANGS = ("query", "items", "apply_softmax", "item_first")


class ScoringBody(ServedBody):
    """A body that asks how likely texts are."""

    rules: ClassVar[fields.Rules] = fields.SCORES
    need: ClassVar[Operation | None] = Operation.GENERATE

    messages: Items[dict[str, Any]] | None = None
    """A chat in place of a text: the texts come as its next message."""
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    client: str | None = None
    adapters: Named[float] | None = None
    policy_data: dict[str, Any] | None = None

    def options(self, model: ServedModel, service: Service) -> Any:
        """Options of the requests, with the adapters of the model that the body names."""
        options = self.served(service)
        if scales := scales_of(self.adapters, model, service):
            options["adapters"] = scales
        if self.messages is not None:
            variables = template_variables(self.chat_template_kwargs, None)
            options["template_kwargs"] = variables
        return options


class ScoreBody(ScoringBody):
    """Continuations of one prompt, or tokens behind a query with each of some items."""

    prompt: Text | None = None
    """A text or token ids."""
    continuations: Items[Text] | None = None
    """Texts or token ids, each of which is scored behind the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Whether the tokens are told, with as many likely ones at each place."""
    query: Text | None = None
    """SGLang's prompt, or the beginning of it."""
    items: Text | Items[str] | Items[TokenIds] | None = None
    """SGLang's ends of the prompt: the labels are scored behind each."""
    label_token_ids: Items[int] | None = None
    """SGLang's labels: tokens that might come next."""
    apply_softmax: bool = False
    """Whether the probabilities of labels sum up to 1."""
    item_first: bool = False
    """Whether items come before the query."""


class ClassifyBody(ScoringBody):
    """Texts that are to get one of some labels."""

    input: Text | Items[str] | Items[TokenIds] | None = None
    """Texts or token ids, each of which ends where the label is to come."""
    labels: Items[str] | None = None
    """Texts of which one is to come next."""
    measure: Literal["total", "per_token", "per_byte"] = "total"
    """The probability that is compared: of the whole label, or of a token or a byte of it."""


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/v1/score", tags=["scores"])
    @app.post("/score", include_in_schema=False)
    async def score(body: ScoreBody, request: Request) -> Response:
        """Tell how likely each continuation of a prompt is, or each label behind items."""
        model = service.find(body.model, Operation.GENERATE)
        exchange: Exchange = request.state.exchange
        exchange.model = model.name
        options = service.text_options_of(exchange, body.options(model, service))
        _check_form(body)
        if body.label_token_ids is not None:
            return JSON(await _scored_items(body, model, options, exchange, service))
        return JSON(await _scored(body, model, options, exchange, service))

    @app.post("/v1/classify", tags=["scores"])
    @app.post("/classify", include_in_schema=False)
    async def classify(body: ClassifyBody, request: Request) -> Response:
        """Tell which label of a text is the likeliest, and the probabilities of all."""
        model = service.find(body.model, Operation.GENERATE)
        exchange: Exchange = request.state.exchange
        exchange.model = model.name
        options = service.text_options_of(exchange, body.options(model, service))
        labels, prompts = body.labels, _prompts(body, "input", body.input)
        if not labels:
            reason = "give some: the model generates, and has no classes of its own"
            raise refused("labels", reason)
        _check_many(service, model, "labels", len(prompts), len(labels))
        of_all = await _in_turn(
            lambda prompt: model.engine.classify(
                prompt, labels, body.measure, **options
            ),
            prompts,
            {"prompt": "input"},
        )
        data = [_classified(index, scores) for index, scores in enumerate(of_all)]
        likelihoods = [[score.likelihood for score in scores] for scores in of_all]
        usage = _usage(likelihoods, exchange)
        return JSON(_head("classify", model) | {"data": data, "usage": usage})


def _check_form(body: ScoreBody) -> None:
    """Raise Failure if a field of one form stands beside those of the other, which does not read it."""
    is_sglangs = body.label_token_ids is not None
    for name in OURS if is_sglangs else SGLANGS:
        value = getattr(body, name)
        if value is None or value is False:
            continue
        if is_sglangs:
            raise refused(name, "leave it out beside label_token_ids")
        raise refused(name, "give it with label_token_ids, or leave it out")
    # An item goes on with a text or with tokens, and a chat is neither.
    if body.items is not None and body.messages is not None:
        raise refused("items", "give a query with it, and no messages")


async def _scored(
    body: ScoreBody,
    model: ServedModel,
    options: Any,
    exchange: Exchange,
    service: Service,
) -> dict[str, Any]:
    """Scores of the continuations of one prompt."""
    prompt = _prompt(body, "prompt", body.prompt)
    if not body.continuations:
        raise refused("continuations", "give one or more, or SGLang's label_token_ids")
    _check_many(service, model, "continuations", 1, len(body.continuations))
    likelihoods = await model.engine.score_many(
        prompt, body.continuations, body.logprobs or 0, **options
    )
    data = [
        _score(index, likelihood, lists=body.logprobs is not None)
        for index, likelihood in enumerate(likelihoods)
    ]
    usage = _usage([likelihoods], exchange)
    return _head("score", model) | {"data": data, "usage": usage}


async def _scored_items(
    body: ScoreBody,
    model: ServedModel,
    options: Any,
    exchange: Exchange,
    service: Service,
) -> dict[str, Any]:
    """Scores of tokens behind the query with each item, in SGLang's form."""
    labels = [[token] for token in body.label_token_ids or ()]
    if not labels:
        raise refused("label_token_ids", "give one or more")
    query: Any = _prompt(body, "query", body.query)
    items = [""] if body.items is None else _several(body.items)
    if body.items is not None and any(type(item) is not type(query) for item in items):
        raise refused("items", "give texts with a text, token ids with token ids")
    _check_many(service, model, "label_token_ids", len(items), len(labels))
    # Each prompt has all of the query, so few may have a long one.
    n_all = len(query) * len(items) + sum(map(len, items))
    if n_all > service.bodies.max_bytes:
        limit = f"at most {service.bodies.max_bytes} are allowed (max_body_bytes)"
        reason = f"the query with each item has {n_all} characters or tokens: {limit}"
        raise refused("items", reason, "too_many_texts")
    prompts = [
        query
        if body.items is None
        else item + query
        if body.item_first
        else query + item
        for item in items
    ]
    of_all = await _in_turn(
        lambda prompt: model.engine.score_many(prompt, labels, **options),
        prompts,
        {"prompt": "query", "continuations": "label_token_ids"},
    )
    scores = []
    for likelihoods in of_all:
        totals = [likelihood.total for likelihood in likelihoods]
        scores.append(softmax(totals) if body.apply_softmax else [*map(exp, totals)])
    usage = _usage(of_all, exchange)
    return _head("score", model) | {
        "object": "scoring",
        "scores": scores,
        "usage": usage,
    }


def _several(texts: Any) -> list[Any]:
    """A list of texts or of lists of token ids; a single one may stand for it."""
    is_one = isinstance(texts, str) or (texts and isinstance(texts[0], int))
    return [texts] if is_one else list(texts)


def _prompts(body: ScoringBody, name: str, texts: Any) -> list[Any]:
    """The chat of *body*, or the texts that the field *name* has. Raises Failure."""
    if body.messages is not None and texts is not None:
        raise refused(name, "give it, or messages, and not both")
    prompts = [body.messages] if body.messages is not None else _several(texts or [])
    if not all(prompts) or not prompts:
        raise refused(name, "give at least one token of it, or messages")
    return prompts


def _prompt(body: ScoringBody, name: str, text: Any) -> Any:
    (prompt,) = _prompts(body, name, text)
    return prompt


def _check_many(
    service: Service, model: ServedModel, name: str, n_prompts: int, n_texts: int
) -> None:
    """Raise Failure if the field *name*, for all prompts, has more than one body may ask for."""
    service.check_texts(name, n_prompts * n_texts)
    service.check_outputs(model, n_prompts, n_texts, name)


async def _in_turn(
    ask: Callable[[Any], Coroutine[Any, Any, T]],
    prompts: Sequence[Any],
    names: Mapping[str, str],
) -> list[T]:
    """
    Answers to all *prompts*, which the engine computes together; raises the first error.

    Args:
        names: of fields of the body, by what the engine calls them.
    """
    answers: dict[int, T] = {}

    async def run(index: int) -> None:
        try:
            answers[index] = await ask(prompts[index])
        except InvalidRequest as error:
            name = renamed(error.name, names)
            raise InvalidRequest(name, error.value, error.allowed) from error

    try:
        async with create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(run, index)
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    return [answers[index] for index in range(len(prompts))]


def _head(prefix: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": "list",
        "created": int(time()),
        "model": model.name,
    }


def _score(index: int, likelihood: Likelihood, *, lists: bool) -> dict[str, Any]:
    """A continuation; *lists*: with its tokens."""
    entry: dict[str, Any] = {
        "index": index,
        "object": "score",
        "score": max(likelihood.total, LEAST),
        "per_token": max(likelihood.per_token, LEAST),
        "per_byte": max(likelihood.per_byte, LEAST),
        "n_tokens": len(likelihood.token_ids),
    }
    if lists:
        entry["tokens"] = [
            {
                "id": token.token_id,
                "token": _name(token.piece),
                "logprob": max(token.logprob, LEAST),
                "top": [
                    {"id": id_, "token": _name(piece), "logprob": max(logprob, LEAST)}
                    for (id_, logprob), piece in zip(
                        token.top, token.top_pieces, strict=True
                    )
                ],
            }
            for token in likelihood.logprobs
        ]
    return entry


def _name(piece: bytes) -> str:
    return piece.decode(errors="backslashreplace")


def _classified(index: int, scores: Sequence[LabelScore]) -> dict[str, Any]:
    """The likeliest label of a text, and of all labels the probabilities, in their order."""
    ordered = sorted(scores, key=lambda score: score.index)
    return {
        "index": index,
        "label": scores[0].label,
        "probs": [score.probability for score in ordered],
        "num_classes": len(scores),
        "logprobs": [max(score.likelihood.total, LEAST) for score in ordered],
    }


def _usage(
    of_prompts: Iterable[Sequence[Likelihood]], exchange: Exchange
) -> dict[str, Any]:
    """Counts of tokens: each prompt once, and all that is scored behind it."""
    n_prompt = n_cached = 0
    for likelihoods in of_prompts:
        first, counts = likelihoods[0], [len(item.token_ids) for item in likelihoods]
        n_prompt += first.usage.prompt_tokens - len(first.token_ids) + sum(counts)
        n_cached += min(item.usage.cached_tokens for item in likelihoods)
    exchange.n_prompt += n_prompt
    exchange.n_cached += n_cached
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": 0,
        "total_tokens": n_prompt,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
