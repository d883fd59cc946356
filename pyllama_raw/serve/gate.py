"""
What all requests pass before they are read: ids, keys, limits, whether there is room.

It is ASGI itself and no middleware class of a framework, because those wrap streams, and
because a refusal must cost next to nothing.

Rules:
1. Probes and the page need no key; nothing else comes in without one where there are keys.
2. A request that finds no room is refused before its body is read, and once more when it is:
   clients that send slowly take no places.
"""

from __future__ import annotations

import re
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyllama_raw.serve.exchange import LEFT, Exchange, working_for
from pyllama_raw.serve.failures import JSON, Failure
from pyllama_raw.serve.keys import ADMIN, MONITOR
from pyllama_raw.serve.reading import is_small, let_go, replayed
from pyllama_raw.serve.service import Service

OPEN = {"/", "/livez", "/readyz", "/health", "/v1/health"}
CHANGED = "/lora-adapters"  # by an operator only
WATCHED = {"/metrics"}  # what all do is in it, so keys need the right to see that
CHANGING = {"POST", "PUT", "PATCH", "DELETE"}  # methods with a body that is read
IDS = re.compile(r"[\x21-\x7e]{1,256}")


class Gate:
    """Answers what cannot come in; all else goes on to the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope)
        exchange = _begun(scope, given)
        own = [(b"x-request-id", exchange.request_id.encode())]

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *own]
                if exchange.ignored:
                    names = ", ".join(dict.fromkeys(exchange.ignored)).encode()
                    message["headers"].append((b"x-ignored-fields", names))
                if self._service.drains and scope["http_version"].startswith("1"):
                    message["headers"].append((b"connection", b"close"))
            else:
                exchange.n_bytes += len(message.get("body", b""))
                exchange.is_whole = not message.get("more_body", False)
            await send(message)

        self._service.traffic.in_flight += 1
        try:
            with working_for(exchange):
                await self._pass(scope, given, receive, answer)
        except Exception:
            if exchange.status == LEFT:  # nothing was sent
                message = "the server failed: its log says more, under the x-request-id"
                failure = Failure(500, "internal_error", message)
                await failure.answer(scope["path"])(scope, receive, answer)
            raise
        finally:
            self._service.traffic.in_flight -= 1
            self._service.ended(exchange, getattr(scope.get("route"), "path", ""))

    async def _pass(
        self, scope: Scope, given: Headers, receive: Receive, send: Send
    ) -> None:
        """Let the request in, or answer that it cannot come in."""
        service, exchange = self._service, scope["state"]["exchange"]
        body: bytes | None = None
        try:
            self._check(scope, given, exchange)
            if scope["method"] not in CHANGING:
                await self._app(scope, receive, send)
                return
            body = await service.bodies.read(receive)
            if body is None:  # the client left
                return
            with service.places.taken():
                await self._app(scope, replayed(body, receive), send)
        except Failure as failure:
            exchange.refused = failure.code
            is_unread = body is None and not is_small(given)
            response = failure.answer(scope["path"])
            await _refuse(response, receive if is_unread else None, send)

    def _check(self, scope: Scope, given: Headers, exchange: Exchange) -> None:
        """Raise Failure if the head of a request says that it cannot come in."""
        service, has_body = self._service, scope["method"] in CHANGING
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in OPEN or has_body:
            right = None
            if path.startswith(CHANGED) and has_body:
                right = ADMIN
            elif path in WATCHED:
                right = MONITOR
            exchange.key = service.keys.check(given, right)
        if not has_body:
            return
        if service.drains:
            message = "the service is about to end: ask another one"
            raise Failure(503, "server_is_draining", message)
        service.places.check()
        service.bodies.check(given.get("content-length", "0"))
        service.rates.enter(exchange.client)


def _begun(scope: Scope, given: Headers) -> Exchange:
    request_id = given.get("x-request-id", "")
    if not IDS.fullmatch(request_id):
        request_id = uuid4().hex
    exchange = Exchange(request_id, scope["method"], scope["path"])
    scope.setdefault("state", {})["exchange"] = exchange
    return exchange


async def _refuse(response: JSON, unread: Receive | None, send: Send) -> None:
    """
    Send *response* at once, and end when the client had time to read it.

    Args:
        unread: what the rest of the body comes from.
    """
    start = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **start})
    part = {"body": response.body, "more_body": True}
    await send({"type": "http.response.body", **part})
    if unread is not None:
        await let_go(unread)
    await send({"type": "http.response.body"})
