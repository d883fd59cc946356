"""HTTP beneath a RemoteRunner: the library, events of an answer, and errors that it tells."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anyio import move_on_after

from pyllama_raw.errors import ConfigError, PromptTooLong, PyllamaError, Unsupported
from pyllama_raw.runners.errors import (
    AuthFailed,
    RateLimited,
    RemoteRefused,
    ServerError,
    UnexpectedAnswer,
)

if TYPE_CHECKING:
    import httpx2

DONE = "[DONE]"
PATIENCE_S = 1.0  # for the end of an answer that has said that it is done
MAX_EVENT_BYTES = 2**24
STATUSES = {  # of errors within a stream, by type or code
    "rate_limit_error": 429,
    "authentication_error": 401,
    "service_unavailable_error": 503,
}
BUSY = ("server_is_overloaded", "queue_full")  # codes of load, which is no failure


def http_library() -> ModuleType:
    """
    The package httpx2.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module("httpx2")
    except ImportError as error:
        said = "a RemoteRunner needs httpx2: pip install 'pyllama_raw[runners]'"
        raise ConfigError(said) from error


async def event_data(response: httpx2.Response) -> AsyncGenerator[str, None]:
    """The data of each event of *response*, until it is done or broken off."""
    import httpx2

    events = aiter(httpx2.EventSource(response, MAX_EVENT_BYTES))
    is_done = False
    try:
        async for event in events:
            is_done = event.data == DONE
            if is_done:
                break
            if event.data:
                yield event.data
    except httpx2.SSEError as error:
        raise UnexpectedAnswer(str(error)) from error
    finally:
        # A connection that was read to its end is used again. A read that is cancelled ends
        # the generators inside httpx2, which are otherwise left to the garbage collector.
        patience_s = PATIENCE_S if is_done else 0.0
        with move_on_after(patience_s, shield=True), suppress(Exception):
            async for _ in events:
                pass


async def refusal(response: httpx2.Response) -> PyllamaError:
    """The error that an answer without success tells."""
    text = (await response.aread()).decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    wait_s = retry_after_s(response.headers.get("retry-after"))
    return error_of(response.status_code, body, wait_s)


def retry_after_s(text: str | None, now: datetime | None = None) -> float | None:
    """Seconds of the header Retry-After, which has a number or a date; None: it is neither."""
    given = (text or "").strip()
    if given.isascii() and given.isdigit():
        return float(given)
    try:
        at = parsedate_to_datetime(given)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max((at - (now or datetime.now(UTC))).total_seconds(), 0.0)


def error_of(
    status: int | None, body: Any, retry_after_s: float | None = None
) -> PyllamaError:
    """
    The error that a service tells.

    Args:
        status: of the answer; None: it came within a stream.
        body: as JSON, or text.
    """
    told = body.get("error", body) if isinstance(body, Mapping) else body
    told = told if isinstance(told, Mapping) else {"message": str(told or "")}
    message, code = str(told.get("message") or told), told.get("code")
    if status is None:
        status = (
            code if isinstance(code, int) else STATUSES.get(told.get("type", ""), 500)
        )
    if status == 429 or (status == 503 and code in BUSY):
        return RateLimited(message, retry_after_s)
    if status in (408, 409) or status >= 500:
        return ServerError(status, message, retry_after_s)
    if status < 400:
        return UnexpectedAnswer(f"unexpected status {status}: {message}")
    return _fault_of_caller(status, message, told)


def _fault_of_caller(
    status: int, message: str, told: Mapping[str, Any]
) -> PyllamaError:
    """The error of an answer 4xx: ours, if the service tells enough."""
    n_prompt, n_ctx = told.get("n_prompt_tokens"), told.get("n_ctx")
    code, param = told.get("code"), told.get("param")
    if status == 401:
        return AuthFailed(f"the server answered 401: {message}")
    if isinstance(n_prompt, int) and isinstance(n_ctx, int):
        return PromptTooLong(n_prompt, n_ctx)
    if code == "unsupported":
        return Unsupported(str(param or "request"), message)
    return RemoteRefused(status, message, None if code is None else str(code), param)
