"""The application: routes of all dialects over the engines, behind one door."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw import AsyncEngine, PyllamaError, __version__
from pyllama_raw.errors import ConfigError
from pyllama_raw.serve import facts, models, page, texts, tokens, vectors
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import DESCRIBED, Failure, failure_of, refused, words_of
from pyllama_raw.serve.gate import Gate
from pyllama_raw.serve.service import Service

ROUTES: tuple[Callable[[FastAPI, Service], None], ...] = (
    *(texts.openai_routes, texts.agent_routes, texts.native_routes),
    *(vectors.routes, tokens.routes),
    *(models.routes, facts.routes, page.routes),
)
LOCALHOST = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def make_app(
    engines: AsyncEngine | Mapping[str, AsyncEngine], config: ServeConfig | None = None
) -> FastAPI:
    """
    The application over open engines; any ASGI server can run it.

    The engines stay the caller's: it closes them when the server has ended.

    Args:
        engines: by the names that clients use; a single one is named by its model.

    Raises:
        ConfigError: there is no engine.
    """
    if isinstance(engines, AsyncEngine):
        engines = {engines.model_name or "model": engines}
    if not engines:
        raise ConfigError("a service needs an engine: give one or more by name")
    service = Service(dict(engines), config or ServeConfig())
    app = FastAPI(
        title="pyllama_raw",
        version=__version__,
        responses=DESCRIBED,
        strict_content_type=False,  # a page of another host cannot leave it out
    )
    app.state.service = service
    for routes in ROUTES:
        routes(app, service)
    app.add_exception_handler(RequestValidationError, _wrong_body)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Failure, _failed)
    app.add_exception_handler(PyllamaError, _failed)
    app.add_middleware(Gate, service=service)
    origins = service.config.cors_origins
    if origins:  # before the gate, as questions of browsers have no key
        app.add_middleware(
            Origins,
            allow_origin_regex=_pattern_of(origins),
            allow_credentials="*" not in origins,  # any page could use a user's cookies
            allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-cached-tokens", "retry-after"),
        )
    return app


class Origins(CORSMiddleware):
    """Says yes to a browser by headers, and no by leaving them out: 200 is either."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser's question."""
        answer = super().preflight_response(request_headers)
        answer.status_code = 200
        return answer


def _pattern_of(origins: Iterable[str]) -> str:
    """A regular expression of the *origins*, for a full match."""
    known = {"localhost": LOCALHOST, "*": ".*"}
    patterns = (
        known.get(origin) or r"[^/]*".join(map(re.escape, origin.split("*")))
        for origin in origins
    )
    return "|".join(f"(?:{pattern})" for pattern in patterns)


async def _wrong_body(request: Request, error: Exception) -> Response:
    """The deepest mistake, with the field as OpenAI writes it: `messages[0].content`."""
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    names = [
        _place(one["loc"], error.body, is_missing=one["type"] == "missing")
        for one in mistakes
    ]
    first = max(mistakes, key=lambda mistake: len(mistake["loc"]))
    name = names[mistakes.index(first)]
    same = [one for at, one in zip(names, mistakes, strict=True) if at == name]
    is_other = "json" not in request.headers.get("content-type", "json")
    if name == "body" and first["type"] != "json_invalid" and is_other:
        first = {"msg": "send it with the header `content-type: application/json`"}
        same = [first]
    return refused(name, words_of(same)).answer(request.url.path)


def _place(loc: Sequence[str | int], body: Any, *, is_missing: bool) -> str:
    """The field at *loc*, without pydantic's names for the branches of a union."""
    name, at = "", body
    for part in loc[1:]:
        if isinstance(at, dict) and (part in at or is_missing):
            name += f".{part}"
            at = at.get(part)
        elif isinstance(at, list) and isinstance(part, int):
            name += f"[{part}]"
            at = at[part] if part < len(at) else None  # one may be missing
    return name.removeprefix(".") or str(loc[0] if loc[0] == "body" else loc[-1])


async def _refused(request: Request, error: Exception) -> Response:
    """No such route, another method, or a body that is no JSON."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(
        error.status_code, "invalid_request"
    )
    param = "body" if error.status_code == 400 else None
    message = f"{request.method} {request.url.path}: {error.detail}"
    failure = Failure(error.status_code, code, message, param, headers=error.headers)
    path = getattr(request.scope.get("route"), "path", None)
    if error.status_code == 405 and path in (paths := request.app.openapi()["paths"]):
        # the router knows the methods of one of the routes that have the path
        failure.headers["allow"] = ", ".join(paths[path]).upper()
    return failure.answer(request.url.path)


async def _failed(request: Request, error: Exception) -> Response:
    """An error before anything of the answer was sent."""
    assert isinstance(error, Failure | PyllamaError)
    if isinstance(error, PyllamaError):
        error = failure_of(error, request.app.state.service.places.retry_s())
    return error.answer(request.url.path)
