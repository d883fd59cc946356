"""The application: routes of all dialects over the engines, behind one door."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from pyllama_raw import AsyncEngine, PyllamaError, __version__
from pyllama_raw.errors import ConfigError
from pyllama_raw.runners import ModelCache
from pyllama_raw.serve import (
    actions,
    catalog,
    facts,
    llamacpp,
    messages,
    openai,
    page,
    responses,
    scores,
    tokens,
    vectors,
)
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import (
    DESCRIBED,
    JSON,
    Failure,
    failure_of,
    refused,
)
from pyllama_raw.serve.gate import BodyRoute, Gate
from pyllama_raw.serve.service import Elsewhere, Service, retry_s

ROUTES: tuple[Callable[[FastAPI, Service], None], ...] = (
    *(openai.routes, responses.routes, messages.routes, llamacpp.routes),
    *(vectors.routes, scores.routes, tokens.routes, catalog.routes, facts.routes),
    *(catalog.routes_of_cache, actions.routes, page.routes),
)
LOCALHOST = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def make_app(
    engines: AsyncEngine | Mapping[str, AsyncEngine] | ModelCache,
    config: ServeConfig | None = None,
    **options: Any,
) -> FastAPI:
    """
    The application over open engines, or a cache of models; any ASGI server can run it.

    The engines stay the caller's: it closes them when the server has ended. So does the cache.

    Args:
        engines: by the names that clients use; a single one is named by its model. Models of a cache
            are loaded when they are asked for.
        options: of Service.

    Raises:
        ConfigError: there is no engine.
    """
    # A single engine is known by the name of its model.
    if isinstance(engines, AsyncEngine):
        engines = {engines.model_name or "model": engines}
    if not isinstance(engines, ModelCache):
        if not engines:
            raise ConfigError("a service needs an engine: give one or more by name")
        engines = dict(engines)
    service = Service(engines, config or ServeConfig(), **options)
    app = FastAPI(
        title="pyllama_raw",
        version=__version__,
        responses=DESCRIBED,
        strict_content_type=False,  # a page of another host cannot leave it out
    )
    app.state.service = service
    # Routes that are added from here on have their bodies read by our rules.
    app.router.route_class = BodyRoute
    _describe(app)
    for routes in ROUTES:
        routes(app, service)
    app.add_exception_handler(RequestValidationError, _wrong_query)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Failure, _failed)
    app.add_exception_handler(PyllamaError, _failed)
    app.add_exception_handler(Elsewhere, _sent_on)
    app.add_middleware(Gate, service=service)
    origins = service.config.cors_origins
    if origins:  # before the gate, as questions of browsers have no key
        app.add_middleware(
            Origins,
            allow_origin_regex=_pattern_of(origins),
            allow_credentials="*" not in origins,  # any page could use a user's cookies
            allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=(
                *("x-request-id", "x-cached-tokens", "x-ignored-fields"),
                "retry-after",
            ),
        )
    return app


def _describe(app: FastAPI) -> None:
    """Serve the description from a thread, because to make it takes a second or more."""
    path, routes = app.openapi_url, app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", None) != path]
    limiter = CapacityLimiter(1)

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> Response:
        return JSON(await to_thread.run_sync(app.openapi, limiter=limiter))


class Origins(CORSMiddleware):
    """Says yes to a browser by headers, and no by leaving them out: 200 is either."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser's question."""
        answer = super().preflight_response(request_headers)
        answer.status_code = 200
        return answer


def _pattern_of(origins: Iterable[str]) -> str:
    """A regular expression of the *origins*, for a full match."""
    words = {"localhost": LOCALHOST, "*": ".*"}
    patterns = (
        words.get(origin) or r"[^/]*".join(map(re.escape, origin.split("*")))
        for origin in origins
    )
    return "|".join(f"(?:{pattern})" for pattern in patterns)


async def _wrong_query(request: Request, error: Exception) -> Response:
    """Answer a mistake in the address, or in a body of a route beside ours."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return refused(str(first["loc"][-1]), first["msg"]).answer(request.url.path)


async def _refused(request: Request, error: Exception) -> Response:
    """No such route, or another method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(
        error.status_code, "invalid_request"
    )
    param = "body" if error.status_code == 400 else None
    message = f"{request.method} {request.url.path}: {error.detail}"
    failure = Failure(error.status_code, code, message, param, headers=error.headers)
    # The router knows the methods of one route of the path, and the path may have several.
    if error.status_code == 405:
        routes = (route for route in request.app.routes if isinstance(route, Route))
        fitting = (r for r in routes if r.matches(request.scope)[0] is not Match.NONE)
        methods = {method for route in fitting for method in route.methods or ()}
        methods |= {"HEAD"} if "GET" in methods else set()
        failure.headers.pop("Allow", None)
        failure.headers["allow"] = ", ".join(sorted(methods))
    return failure.answer(request.url.path)


async def _sent_on(request: Request, error: Exception) -> Response:
    """The answer of the process that has the model."""
    assert isinstance(error, Elsewhere)
    return error.process.sent_on(request, request.app.state.service)


async def _failed(request: Request, error: Exception) -> Response:
    """An error before anything of the answer was sent."""
    assert isinstance(error, Failure | PyllamaError)
    if isinstance(error, PyllamaError):
        engines = request.app.state.service.engines.values()
        error = failure_of(error, retry_s(engines))
    return error.answer(request.url.path)
