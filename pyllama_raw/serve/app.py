"""The application: routes of all dialects over the engines, behind one door."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw import AsyncEngine, PyllamaError, __version__
from pyllama_raw.errors import ConfigError
from pyllama_raw.serve import adapters, facts, models, page, probes, tokens, vectors
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import DESCRIBED, Failure, failure_of, refused
from pyllama_raw.serve.gate import Gate
from pyllama_raw.serve.json import JSON
from pyllama_raw.serve.native import routes as native
from pyllama_raw.serve.openai import chat, completions
from pyllama_raw.serve.origins import Origins, pattern_of
from pyllama_raw.serve.service import Service

ROUTES: tuple[Callable[[Service], APIRouter], ...] = (
    *(chat.routes, completions.routes, native.routes, vectors.routes, tokens.routes),
    *(models.routes, adapters.routes, facts.routes, probes.routes),
    page.routes,
)


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
        app.include_router(routes(service))
    app.add_exception_handler(RequestValidationError, _wrong_body)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Failure, _failed)
    app.add_exception_handler(PyllamaError, _failed)
    app.add_middleware(Gate, service=service)
    origins = service.config.cors_origins
    if origins:  # before the gate, as questions of browsers have no key
        app.add_middleware(
            Origins,
            allow_origin_regex=pattern_of(origins),
            allow_credentials="*" not in origins,  # any page could use a user's cookies
            allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-cached-tokens", "retry-after"),
        )
    return app


async def _wrong_body(request: Request, error: Exception) -> Response:
    """The deepest mistake, with the field as OpenAI writes it: `messages[0].content`."""
    assert isinstance(error, RequestValidationError)
    first = max(error.errors(), key=lambda mistake: len(mistake["loc"]))
    name = _place(first["loc"], error.body, is_missing=first["type"] == "missing")
    is_other = "json" not in request.headers.get("content-type", "json")
    if name == "body" and first["type"] != "json_invalid" and is_other:
        first = {"msg": "send it with the header `content-type: application/json`"}
    return JSON(*refused(name, first["msg"]).parts)


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
    return JSON(*failure.parts)


async def _failed(request: Request, error: Exception) -> Response:
    """An error before anything of the answer was sent."""
    assert isinstance(error, Failure | PyllamaError)
    if isinstance(error, PyllamaError):
        error = failure_of(error, request.app.state.service.places.retry_s())
    return JSON(*error.parts)
