"""The application: routes of all dialects over the engines, behind one door."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from pyllama_raw import AsyncEngine, PyllamaError, __version__
from pyllama_raw.errors import ConfigError
from pyllama_raw.serve import facts, models, page, texts, tokens, vectors
from pyllama_raw.serve.body import Body
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import (
    DESCRIBED,
    JSON,
    Failure,
    failure_of,
    refused,
)
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
    app.router.route_class = BodyRoute
    _describe(app)
    for routes in ROUTES:
        routes(app, service)
    app.add_exception_handler(RequestValidationError, _wrong_query)
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
            allow_methods=("GET", "HEAD", "POST", "DELETE", "OPTIONS"),
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
    one = CapacityLimiter(1)

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> Response:
        return JSON(await to_thread.run_sync(app.openapi, limiter=one))


class BodyRoute(APIRoute):
    """A route whose body is read by our rules (serve/reading.py); FastAPI describes it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of requests; FastAPI's own if the route has no body of ours."""
        fields, function = self.dependant.body_params, self.endpoint
        model = fields[0].field_info.annotation if len(fields) == 1 else None
        if not (isinstance(model, type) and issubclass(model, Body)):
            return super().get_route_handler()
        name, request_name = fields[0].name, self.dependant.request_param_name

        async def handle(request: Request) -> Response:
            service: Service = request.app.state.service
            content = (await request.receive())["body"]
            body = await service.bodies.made(model, request.headers, content)
            del content  # it stays no longer than its answer needs it
            more = {request_name: request} if request_name else {}
            response: Response = await function(**{name: body}, **more)
            return response

        return handle


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
    if (
        error.status_code == 405
    ):  # the router knows the methods of one route of the path
        failure.headers.pop("Allow", None)
        failure.headers["allow"] = ", ".join(sorted(_methods(request)))
    return failure.answer(request.url.path)


def _methods(request: Request) -> set[str]:
    """The methods of all routes that have the path of *request*."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    fitting = (r for r in routes if r.matches(request.scope)[0] is not Match.NONE)
    methods = {method for route in fitting for method in route.methods or ()}
    return methods | ({"HEAD"} if "GET" in methods else set())


async def _failed(request: Request, error: Exception) -> Response:
    """An error before anything of the answer was sent."""
    assert isinstance(error, Failure | PyllamaError)
    if isinstance(error, PyllamaError):
        error = failure_of(error, request.app.state.service.places.retry_s())
    return error.answer(request.url.path)
