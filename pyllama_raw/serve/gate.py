"""
What all requests pass before they are read: ids, limits of bodies, whether there is room.

It is ASGI itself and no middleware class of a framework, because those wrap streams.
"""

from __future__ import annotations

from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.json import JSON
from pyllama_raw.serve.service import Service

MAX_ID = 256  # characters


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
        request_id = given.get("x-request-id", "")[:MAX_ID] or uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = (b"x-request-id", request_id.encode("latin-1", "replace"))
                message["headers"] = [*message.get("headers", ()), own]
            await send(message)

        try:
            self._check(scope, given)
        except Failure as failure:
            response = JSON(failure.body(), failure.status, failure.headers)
            await response(scope, receive, answer)
            return
        await self._app(scope, receive, answer)

    def _check(self, scope: Scope, given: Headers) -> None:
        """Raise Failure if the request cannot come in."""
        service = self._service
        if scope["method"] == "POST" and service.drains:
            headers = {"retry-after": "1", "connection": "close"}
            message = "the service is about to end: ask another one"
            raise Failure(503, "server_is_draining", message, headers=headers)
        length = given.get("content-length", "0")
        if length.isdecimal() and int(length) > service.config.max_body_bytes:
            allowed = f"at most {service.config.max_body_bytes} bytes are allowed"
            message = f"the body has {length} bytes: {allowed}"
            raise Failure(413, "body_too_large", message)
