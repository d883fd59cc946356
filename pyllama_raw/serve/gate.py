"""
The way of a request to its handler. The door is for all of them, before they are read: ids, keys,
limits, whether there is room. A route then parses the body, and waits for the model.

The door is ASGI itself and no middleware class of a framework, because those wrap streams, and
because a refusal must cost next to nothing.

Rules:
1. Probes and the page need no key; nothing else comes in without one where there are keys.
2. A request that finds no room is refused before its body is read, and once more when it is:
   clients that send slowly take no places.
3. The gate alone waits for the client to leave, from the first byte of the handler on, and
   then cancels the handler, wherever it is.
4. A long answer is sent in parts, each within send_s. The request keeps its place meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import uuid4

from anyio import CancelScope, create_task_group, fail_after, sleep_forever
from anyio.abc import TaskGroup
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyllama_raw.errors import first_of
from pyllama_raw.options.arguments import SENDER
from pyllama_raw.serve.body import Body, ServedBody
from pyllama_raw.serve.failures import MESSAGES, NUMBERED, REQUEST_ID, Failure
from pyllama_raw.serve.keys import ADMIN, MONITOR, number_of
from pyllama_raw.serve.reading import is_small, let_go, replayed
from pyllama_raw.serve.service import CURRENT, LEFT, Exchange, Service

OPEN = {"/", "/livez", "/readyz", "/health", "/v1/health"}
CHANGED = ("/lora-adapters", "/slots/", "/props", "/models/")  # by an operator only
LOADS = ("/models/load", "/models/unload")
CLOSED = {  # endpoints that a service may have closed
    "/metrics": "metrics", "/slots": "slots", "/": "page",
}  # fmt: skip
WATCHED = {"/metrics"}  # what all do is in it, so keys need the right to see that
CHANGING = {"POST", "PUT", "PATCH", "DELETE"}  # methods with a body that is read
IDS = re.compile(r"[\x21-\x7e]{1,256}")
SLASHES = re.compile("/{2,}")
PART = 2**16  # bytes of an answer that are sent at once


class Gate:
    """Answers what cannot come in; all else goes on to the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Clients put an address and a path together, and have a slash at both ends. A redirect would
        # leave the encryption of a proxy in front, and some clients follow none.
        root = scope.get("root_path", "")
        path = SLASHES.sub("/", scope["path"]).removeprefix(root).rstrip("/")
        scope = {**scope, "path": f"{root}{path or '/'}"}
        headers, service = Headers(scope=scope), self._service
        request_id = headers.get("x-request-id", "")
        if not IDS.fullmatch(request_id):
            request_id = uuid4().hex
        exchange = Exchange(request_id, scope["method"], scope["path"])
        scope.setdefault("state", {})["exchange"] = exchange
        if scope["method"] == "HEAD":  # is answered as GET, and has no body
            scope = {**scope, "method": "GET"}
        answer = _Answer(service, scope, send)
        current = CURRENT.set(exchange)
        # Without keys each connection has a turn of its own.
        sender = SENDER.set(":".join(map(str, scope.get("client") or ())) or None)
        numbered = NUMBERED.set(service.is_llama)
        id_token = REQUEST_ID.set(request_id)
        service.traffic.in_flight += 1
        try:
            await self._pass(scope, headers, receive, answer)
        except Exception:
            if exchange.status == LEFT:  # nothing was sent
                message = "the server failed: its log says more, under the x-request-id"
                failure = Failure(500, "internal_error", message)
                await failure.answer(scope["path"])(scope, receive, answer.send)
            raise
        finally:
            CURRENT.reset(current)
            SENDER.reset(sender)
            NUMBERED.reset(numbered)
            REQUEST_ID.reset(id_token)
            service.traffic.in_flight -= 1
            # Another model may have the room, if nobody else uses this one.
            if exchange.claim is not None:
                service.models.release(exchange.claim)
                exchange.claim = None
            service.ended(exchange, getattr(scope.get("route"), "path", ""))

    async def _pass(
        self, scope: Scope, headers: Headers, receive: Receive, answer: _Answer
    ) -> None:
        """Let the request in, or answer that it cannot come in."""
        service, exchange = self._service, scope["state"]["exchange"]
        has_body, is_read = scope["method"] in CHANGING, False
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            # Some paths need a key, and some of these one with a right.
            if path not in OPEN or has_body:
                right = None
                # Clients of llama-server change scales and slots, and load nothing.
                is_theirs = service.is_llama and scope["method"] == "POST"
                # Where nobody has a key, each request may load a model anyway.
                is_theirs |= path.startswith(LOADS) and not service.keys
                if path.startswith(CHANGED) and has_body and not is_theirs:
                    right = ADMIN
                elif path in WATCHED:
                    right = MONITOR
                exchange.key = service.keys.check(headers, right)
                if service.is_behind:
                    exchange.number = number_of(headers)
                if exchange.key is not None:
                    exchange.client = exchange.key.name
                    SENDER.set(exchange.client)
            # Without a body it asks for facts, which are told at any time.
            if not has_body:
                service.check_open(CLOSED.get(path))
                await self._handle(scope, replayed(b""), receive, answer)
                return
            # The head alone says that there is no room for the body.
            service.check_room()
            service.rates.enter(exchange.client)
            length = headers.get("content-length", "0")
            body = await service.bodies.read(receive, length)
            if body is None:  # the client left
                return
            is_read, exchange.n_read = True, len(body)
            again = replayed(body)
            if service.has_processes:
                exchange.content = body
            del body  # the handler frees it once it is parsed
            # Others may have come while this one was read.
            service.check_room()
            service.n_open += 1
            try:
                async with service.bodies.used(exchange.n_read):
                    try:
                        await self._handle(scope, again, receive, answer)
                    finally:
                        exchange.content = (
                            b""  # an idle connection has its last exchange
                        )
            finally:
                service.n_open -= 1
        except Failure as failure:
            exchange.refused = failure.code
            response = failure.answer(scope["path"])
            start = {"status": response.status_code, "headers": response.raw_headers}
            await answer.send({"type": "http.response.start", **start})
            part = {"body": response.body, "more_body": True}
            await answer.send({"type": "http.response.body", **part})
            # The client has the answer, and gets time to read it while it still sends.
            if not is_read and not is_small(headers):
                await let_go(receive)
            await answer.send({"type": "http.response.body"})

    async def _handle(
        self, scope: Scope, body: Receive, receive: Receive, answer: _Answer
    ) -> None:
        """Run the application until the client has its answer, or has left."""

        async def leave() -> None:
            with answer.watching:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

        try:
            async with create_task_group() as group:
                answer.group = group
                group.start_soon(leave)
                await self._app(scope, body, answer.send)
                answer.watching.cancel()
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None


class _Answer:
    """The way of an answer to its client, which counts what is sent."""

    def __init__(self, service: Service, scope: Scope, send: Send) -> None:
        self._service, self._scope, self._send = service, scope, send
        self._exchange: Exchange = scope["state"]["exchange"]
        self.watching = CancelScope()  # of the task that waits for the client to leave
        self.group: TaskGroup | None = None  # of the handler

    async def send(self, message: Message) -> None:
        """Send a message of ASGI, in parts if it is long."""
        exchange = self._exchange
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            own = [(b"x-request-id", exchange.request_id.encode())]
            if MESSAGES in exchange.path:  # Anthropic's API has a name of its own
                own.append((b"request-id", exchange.request_id.encode()))
            if exchange.ignored:
                names = ", ".join(dict.fromkeys(exchange.ignored))
                own.append((b"x-ignored-fields", names.encode()))
            if self._service.drains and self._scope["http_version"].startswith("1"):
                own.append((b"connection", b"close"))
            await self._send(
                {**message, "headers": [*message.get("headers", ()), *own]}
            )
            return
        body = b"" if exchange.method == "HEAD" else message.get("body", b"")
        if len(body) > PART:
            await self._send_parts(body)
            body = b""
        exchange.n_bytes += len(body)
        is_last = not message.get("more_body", False)
        if is_last:  # a server may say that the client left as soon as all is sent
            exchange.is_whole = True
            self.watching.cancel()
        await self._send({**message, "body": body})

    async def _send_parts(self, body: bytes) -> None:
        """Send all of *body*, before the end. A client that does not read it has left."""
        try:
            # The last part is empty, and waits for those before it, too.
            for at in range(0, len(body) + PART, PART):
                part = body[at : at + PART]
                with fail_after(self._service.config.send_s):
                    message = {"body": part, "more_body": True}
                    await self._send({"type": "http.response.body", **message})
                self._exchange.n_bytes += len(part)
        except TimeoutError:
            if self.group is None:
                raise
            self.group.cancel_scope.cancel()
            await sleep_forever()


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
            exchange: Exchange = request.state.exchange
            body = await service.bodies.parse(
                model, request.headers, content, exchange.ignored
            )
            del content  # it stays no longer than its answer needs it
            if service.models.is_dynamic:
                autoload = request.query_params.get("autoload")
                await service.admit(
                    exchange,
                    body.model,
                    body.need,
                    autoload=None if autoload is None else autoload in ("true", "1"),
                    keep_alive_s=body.keep_alive_s,
                    limits=limits_of(body, service),
                )
                if exchange.claim is not None and service.has_processes:
                    return service.processes[exchange.claim.model].sent_on(
                        request, service
                    )
            elif body.keep_alive is not None and not service.is_behind:
                exchange.ignored.append("keep_alive")
            arguments = {name: body} | ({request_name: request} if request_name else {})
            response: Response = await function(**arguments)
            return response

        return handle


def limits_of(body: Body, service: Service) -> dict[str, float]:
    """The limits of time of a *body*, or of the service, that its wait for a model has, too."""
    served = body.served(service) if isinstance(body, ServedBody) else {}
    return {n: served[n] for n in ("deadline_s", "max_wait_s") if n in served}
