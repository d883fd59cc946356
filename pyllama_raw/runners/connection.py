"""
HTTP beneath a RemoteRunner: the library, what is sent, what is read, and errors that it tells.

Rules:
1. All that a service sends is read within `reading()`, all that is sent to it is made by
   `written()`: no error of Python leaves them, whatever the other side or the caller gives.
2. Nothing of a service is read without a limit: events, whole answers, and bodies of errors.
3. A time that a service asks for counts for MAX_WAIT_S at most.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anyio import move_on_after

from pyllama_raw.errors import (
    ConfigError,
    InvalidRequest,
    PromptTooLong,
    PyllamaError,
    Unsupported,
    shown,
)
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
MAX_ERROR_BYTES = 2**16
MAX_WAIT_S = 120.0
CODINGS = ("", "identity", "gzip", "deflate")  # which grow by a thousand at most
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
        advice = "a RemoteRunner needs httpx2: pip install 'pyllama_raw[runners]'"
        raise ConfigError(advice) from error


@contextmanager
def reading(request: str) -> Iterator[None]:
    """Turn what a wrong answer raises while it is read into UnexpectedAnswer."""
    try:
        yield
    except PyllamaError:
        raise
    except (
        *(ValueError, LookupError, TypeError, AttributeError),
        *(ArithmeticError, RecursionError),
    ) as error:
        message = f"{request}: the service answered what its API does not have"
        raise UnexpectedAnswer(message) from error


def written(body: Mapping[str, Any]) -> bytes:
    """
    *body* as JSON.

    Raises:
        InvalidRequest: a field has what JSON does not: a NaN, a circle, too many levels, a
            character that is half a pair, or an object of another kind.
    """
    try:
        return _json(body)
    except (ValueError, TypeError, RecursionError) as error:
        for name, value in body.items():
            try:
                _json({name: value})
            except (ValueError, TypeError, RecursionError):
                raise _unwritable(name, value, error) from error
        raise _unwritable("body", body, error) from error


def _json(value: object) -> bytes:
    return json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode()


def _unwritable(name: object, value: object, error: Exception) -> InvalidRequest:
    reason = f"{type(error).__name__}: {shown(str(error))}"
    return InvalidRequest(
        str(name),
        value,
        "what JSON can hold: texts of whole characters, finite numbers, lists and objects "
        f"without circles ({reason})",
    )


async def event_data(
    response: httpx2.Response, max_characters: int
) -> AsyncGenerator[str, None]:
    """
    The data of each event of *response*, until it is done or broken off.

    Raises:
        UnexpectedAnswer: they have more than *max_characters* together.
    """
    import httpx2

    n_characters = 0
    events = aiter(httpx2.EventSource(response, MAX_EVENT_BYTES))
    is_done = False
    try:
        async for event in events:
            is_done = event.data == DONE
            if is_done:
                break
            n_characters += len(event.data)
            if n_characters > max_characters:
                raise UnexpectedAnswer(
                    f"the service streamed more than {max_characters} characters, which are "
                    "no answer to this request"
                )
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


async def content_of(response: httpx2.Response, max_bytes: int) -> bytes:
    """
    The whole content of *response*.

    Raises:
        UnexpectedAnswer: it has more than *max_bytes*, or an unknown coding.
    """
    content = await _beginning(response, max_bytes + 1)
    if len(content) > max_bytes:
        raise UnexpectedAnswer(
            f"the service answered more than {max_bytes} bytes: ask for less at once"
        )
    return content


async def _beginning(response: httpx2.Response, max_bytes: int) -> bytes:
    """At most *max_bytes* of the content of *response*."""
    check_coding(response)
    content = bytearray()
    async with aclosing(response.aiter_bytes()) as parts:
        async for part in parts:
            content += part
            if len(content) >= max_bytes:
                break
    return bytes(content[:max_bytes])


def check_coding(response: httpx2.Response) -> None:
    """Raise UnexpectedAnswer for a coding that can hide gigabytes in a few bytes."""
    coding = response.headers.get("content-encoding", "").strip().lower()
    if coding not in CODINGS:
        raise UnexpectedAnswer(f"the service answered in {shown(coding)}: not read")


async def refusal(response: httpx2.Response) -> PyllamaError:
    """The error that an answer without success tells; its first MAX_ERROR_BYTES are read."""
    content = await _beginning(response, MAX_ERROR_BYTES)
    text = content.decode(errors="replace")
    body: Any = text
    with suppress(ValueError, RecursionError):
        body = json.loads(text)
    wait_s = retry_after_s(response.headers.get("retry-after"))
    return error_of(response.status_code, body, wait_s)


def retry_after_s(text: str | None, now: datetime | None = None) -> float | None:
    """
    Seconds of the header Retry-After, which has a number or a date; None: it is neither.

    More than MAX_WAIT_S are MAX_WAIT_S.
    """
    header = (text or "").strip()
    if header.isascii() and header.isdigit():
        return min(float(header), MAX_WAIT_S)
    try:
        at = parsedate_to_datetime(header)
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        wait_s = (at - (now or datetime.now(UTC))).total_seconds()
    except (ValueError, OverflowError):  # years and zones may have any number of digits
        return None
    return min(max(wait_s, 0.0), MAX_WAIT_S)


def error_of(
    status: int | None, body: Any, retry_after_s: float | None = None
) -> PyllamaError:
    """
    The error that a service tells.

    Args:
        status: of the answer; None: it came within a stream.
        body: as JSON, or text.
    """
    fields = body.get("error", body) if isinstance(body, Mapping) else body
    if not isinstance(fields, Mapping):
        fields = {"message": fields or ""}
    message, code = fields.get("message") or fields, _text(fields.get("code"))
    message = message if isinstance(message, str) else shown(message)
    if status is None:
        number = fields.get("code")
        is_status = type(number) is int and 100 <= number < 1000
        kind = _text(fields.get("type")) or ""
        status = number if is_status else STATUSES.get(kind, 500)
    if status == 429 or (status == 503 and code in BUSY):
        return RateLimited(message, retry_after_s)
    if status in (408, 409) or status >= 500:
        return ServerError(status, message, retry_after_s)
    if status < 400:
        return UnexpectedAnswer(f"unexpected status {status}: {message}")
    return _fault_of_caller(status, message, code, fields)


def _fault_of_caller(
    status: int, message: str, code: str | None, fields: Mapping[str, Any]
) -> PyllamaError:
    """The error of an answer 4xx: ours, if the service tells enough."""
    n_prompt, n_ctx = fields.get("n_prompt_tokens"), fields.get("n_ctx")
    param = _text(fields.get("param"))
    if status == 401:
        return AuthFailed(f"the server answered 401: {message}")
    if all(type(n) is int and 0 < n < 2**53 for n in (n_prompt, n_ctx)):
        return PromptTooLong(n_prompt, n_ctx)  # type: ignore[arg-type]
    if code == "unsupported":
        return Unsupported(param or "request", message)
    return RemoteRefused(status, message, code, param)


def _text(value: object) -> str | None:
    """*value* as a short text, if it is a text or a number."""
    return str(value)[:200] if type(value) in (str, int, float) else None
