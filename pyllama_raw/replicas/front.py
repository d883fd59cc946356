"""
Front of the replicas: it reads a request, calls by handle, and passes the answer on.

Rules:
1. A request whose replica ends is asked again elsewhere, as long as its client has no token.
2. Later the client is told: an event in a stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from pyllama_raw.replicas.relay import Progress, routed_request
from pyllama_raw.routing import RoutedRequest
from pyllama_raw.serve.codec import event
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.reading import Bodies, check_values

TRIES = 3
WIRE = (  # what a replica is told of a request
    *("type", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)


class Front:
    """Ray calls it with each request; it has no engine."""

    def __init__(self, replicas: Any, config: ServeConfig) -> None:
        self._replicas = replicas.options(stream=True)
        self._bodies, self._max_values = Bodies(config), config.max_body_values

    async def __call__(self, request: Request) -> Response:
        """The answer of a replica."""
        try:
            self._bodies.check(request.headers.get("content-length", "0"))
            body = await self._bodies.read(request.receive)
            if body is None:
                return Response()  # to nobody
            messages = self._messages(request, body)
            return await _response(messages)
        except Failure as failure:
            return failure.answer(request.url.path)

    async def _messages(self, request: Request, body: bytes) -> AsyncIterator[Message]:
        """Parts of one answer. Raises Failure if there is none."""
        read = partial(_counted, request.headers, body, self._max_values)
        routed, progress = await self._bodies.run(read, len(body)), Progress()
        scope: Scope = {n: request.scope[n] for n in WIRE if n in request.scope}
        for _ in range(TRIES):
            try:
                async for message in self._ask(routed, scope, body):
                    if progress.goes_on_with(message):
                        yield message
            except RayActorError:
                if progress.has_token:
                    break
            else:
                return
        failure = Failure(503, "replica_ended", "the replica of this answer has ended")
        if not progress.has_begun:
            raise failure
        yield {"type": "http.response.body", "body": event(failure.body())}

    async def _ask(
        self, routed: RoutedRequest, scope: Scope, body: bytes
    ) -> AsyncIterator[Message]:
        """Answer of one replica. Raises RayActorError if the replica ends."""
        batches = self._replicas.answer.remote(routed, scope, body)
        try:
            async for batch in batches:
                for message in batch:
                    yield message
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise Failure(503, "server_is_overloaded", str(error)) from error
        finally:
            batches.cancel()


def _counted(headers: Headers, body: bytes, max_values: int) -> RoutedRequest:
    """The request of a body that has not too many values. Raises Failure."""
    check_values(body, max_values)
    return routed_request(headers, body)


async def _response(messages: AsyncIterator[Message]) -> Response:
    start = await anext(messages)
    response = StreamingResponse(_bodies(messages), start["status"])
    response.raw_headers = list(start["headers"])
    return response


async def _bodies(messages: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    async with aclosing(messages):  # type: ignore[type-var]
        async for message in messages:
            if message.get("body"):
                yield message["body"]
