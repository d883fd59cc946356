"""
Runs what was asked and sends the answer, whole or in events.

Rules:
1. What goes wrong before the answer begins is a status; what goes wrong later is an event.
2. The requests end when the client leaves, wherever they are: the gate cancels the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from typing import Any

from anyio import create_task_group
from anyio.abc import TaskGroup
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pyllama_raw import (
    FinishReason,
    Generation,
    PyllamaError,
    Result,
)
from pyllama_raw.errors import BadMedia, SamplingFailed, first_of
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.codec import Codec
from pyllama_raw.serve.events import EventStream
from pyllama_raw.serve.exchange import Exchange
from pyllama_raw.serve.failures import JSON, Failure, failure_of
from pyllama_raw.serve.service import Found, Service

UNBEGUN = {  # ends before the answer began
    FinishReason.DEADLINE: (504, "deadline_s was over before the answer began"),
    FinishReason.CLOSED: (503, "the service ends: ask another one, or later"),
}


class TextAnswer(Response):
    """An answer that is computed while it is sent."""

    def __init__(self, service: Service, asked: Asked, codec: Codec) -> None:
        super().__init__()
        self._service, self._asked, self._codec = service, asked, codec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return when all is sent, or the client has left."""
        events = EventStream(send)
        last: ASGIApp | None = None  # of a client that has left
        self._exchange: Exchange = scope["state"]["exchange"]
        self._exchange.model = name = self._asked.found.name
        with self._service.places_of[name].taken():
            with suppress(TimeoutError):  # nobody reads what is sent
                last = await self._answer(events, scope["path"])
            if last is not None:
                await last(scope, receive, send)

    async def _answer(self, events: EventStream, path: str) -> ASGIApp:
        """All of it but the last message."""
        while True:
            try:
                return await self._run(events)
            except BadMedia as error:
                if not events.has_begun and self._asked.goes_on_without(error):
                    self._service.traffic.left_out["image"] += 1
                    continue
                failure = self._failure(error)
            except (Failure, PyllamaError) as error:
                failure = self._failure(error)
            break
        if failure.status in (429, 503):
            self._exchange.refused = failure.code
        if not events.has_begun:
            return failure.answer(path)
        await events.write(self._codec.failed(failure))
        return events.end

    async def _run(self, events: EventStream) -> ASGIApp:
        async with AsyncExitStack() as stack:
            generations = self._generations()
            # It is called when all are left, so also what a client has not waited for counts.
            stack.callback(self._count, generations)
            for generation in generations:
                await stack.enter_async_context(generation)
            if self._asked.streams:
                await self._stream(generations, events)
                return events.end
            async with _together() as group:
                for generation in generations:
                    group.start_soon(generation.collect_all)
            results = [generation.results for generation in generations]
            outputs = [result for of_prompt in results for result in of_prompt]
            _check_begun(outputs)
            n_cached = sum(of_prompt[0].usage.cached_tokens for of_prompt in results)
            headers = {"x-cached-tokens": str(n_cached)}
            told = self._codec.whole(results)
            return JSON(self._with_errors(told, generations), headers=headers)

    def _generations(self) -> list[Generation]:
        asked = self._asked
        options = self._service.text_options_of(self._exchange, asked.options)
        generate = asked.found.engine.generate
        return [generate(prompt, asked.params, **options) for prompt in asked.prompts]

    def _count(self, generations: Sequence[Generation]) -> None:
        """Tokens of the prompts, of what ended, of what failed and of what was left."""
        for generation in generations:
            usage = generation.usage
            self._exchange.n_prompt += usage.prompt_tokens
            self._exchange.n_cached += usage.cached_tokens
            self._exchange.n_output += usage.completion_tokens

    def _with_errors(self, told: Any, generations: Sequence[Generation]) -> Any:
        """The answer *told*, and outputs that failed beside others."""
        n = self._asked.params.n
        failed = [
            {"index": prompt * n + index} | self._failure(error).body()
            for prompt, generation in enumerate(generations)
            for index, error in generation.errors.items()
        ]
        if not failed:
            return told
        return [*told, *failed] if isinstance(told, list) else told | {"errors": failed}

    async def _stream(
        self, generations: Sequence[Generation], events: EventStream
    ) -> None:
        async with _together() as pings:
            config = self._service.config
            pings.start_soon(events.ping, config.ping_s, config.send_s)
            async with _together() as group:
                for prompt, generation in enumerate(generations):
                    group.start_soon(self._write, prompt, generation, events)
            results = [generation.results for generation in generations]
            await events.write(self._codec.done(results))
            pings.cancel_scope.cancel()

    async def _write(
        self, prompt: int, generation: Generation, events: EventStream
    ) -> None:
        """Events of one generation, each as soon as there is something to tell."""
        has_begun = False
        async for delta in generation:
            frames = b"" if has_begun else self._begin(generation)
            has_begun = True
            await events.write(frames + self._codec.delta(prompt, delta))
        results, errors = generation.results, generation.errors
        if not events.has_begun:
            _check_begun(results)
        frames = b"" if has_begun else self._begin(generation)
        ends = [self._codec.ended(prompt, result) for result in results]
        fails = [self._codec.failed(self._failure(e)) for e in errors.values()]
        await events.write(frames + b"".join(ends + fails))

    def _begin(self, generation: Generation) -> bytes:
        return self._codec.begin(len(generation.prompt_token_ids))

    def _failure(self, error: Failure | PyllamaError) -> Failure:
        if isinstance(error, Failure):
            return error
        if isinstance(error, SamplingFailed) and (narrowing := self._asked.narrowing):
            # No other try can end otherwise, so it is the request's fault and not ours.
            reason = f"they leave no token that may come next ({error}): loosen them"
            return Failure(
                400, error.code, f"{', '.join(narrowing)}: {reason}", narrowing[0]
            )
        places = self._service.places_of[self._asked.found.name]
        failure = failure_of(error, places.retry_s())
        failure.param = self._asked.param_of(error) or failure.param
        return failure


def _check_begun(results: Sequence[Result]) -> None:
    """Raise Failure if an end came before any text."""
    for result in results:
        reason = result.finish_reason
        if reason is FinishReason.CLOSED or (
            reason is FinishReason.DEADLINE and not result.token_ids
        ):
            status, message = UNBEGUN[reason]
            raise Failure(status, str(reason), message)


@asynccontextmanager
async def _together() -> AsyncIterator[TaskGroup]:
    """A task group whose first error comes out as it is."""
    try:
        async with create_task_group() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None


async def computed(
    service: Service, found: Found, request: Request, work: Coroutine[Any, Any, Any]
) -> Response:
    """The result of *work* as JSON, which has a place of the model."""
    request.state.exchange.model = found.name
    with closing(work), service.places_of[found.name].taken():
        return JSON(await work)
