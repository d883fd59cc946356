"""
HTTP beneath a RemoteRunner: the library, what is sent, what is read, and errors that it tells.

Rules:
1. All that a service sends is read within `reading()`, all that is sent to it is made by
   `written()`: no error of Python leaves them, whatever the other side or the caller gives.
2. Nothing of a service is read without a limit: events, whole answers, and bodies of errors.
3. A time that a service asks for counts for MAX_WAIT_S at most.
4. A `ServiceAnswer` has the answer in our words, chunk by chunk.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from math import isnan
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anyio import move_on_after

from pyllama_raw.api.results import Delta, Result, Timings, Usage
from pyllama_raw.core.request import FinishReason, TokenLogprobs
from pyllama_raw.errors import (
    ConfigError,
    InvalidRequest,
    PromptTooLong,
    PyllamaError,
    Unsupported,
    shown,
)
from pyllama_raw.replies.parser import (
    CallDelta,
    Content,
    Part,
    Reasoning,
    calls_of,
    text_of,
)
from pyllama_raw.runners.errors import (
    AuthFailed,
    ContentFiltered,
    NetworkError,
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


REASONS = tuple(FinishReason)
NOT_KNOWN = -1  # the id of a token of which only its text is told
MAX_CALLS = 1024  # of tools in a reply
MAX_COUNT = 2**53  # of tokens; larger ones are no counts


@dataclass(slots=True)
class _Output:
    """The part of one output that has come."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    n_deltas: int = 0
    reason: FinishReason | None = None


class ServiceAnswer:
    """
    One answer while it comes.

    What is no answer to the request raises whatever Python raises of it; `reading()` of
    connection.py makes UnexpectedAnswer of that.

    Args:
        n: outputs that were asked for.
        reasoning: names of fields with reasoning.
        seed: the one that was sent. None: the service has drawn one, and does not tell it.
    """

    def __init__(self, n: int, reasoning: Sequence[str], seed: int | None) -> None:
        self._outputs = [_Output() for _ in range(n)]
        self._reasoning, self._seed = reasoning, seed
        self._usage: Usage | None = None
        self._began_at = perf_counter()
        self._first_at: float | None = None

    def take(self, chunk: Any) -> list[Delta]:
        """
        The deltas of *chunk*.

        Raises:
            PyllamaError: it tells of an error.
        """
        if not isinstance(chunk, Mapping):
            raise UnexpectedAnswer("a chunk of the stream is no JSON object")
        if chunk.get("error"):
            raise error_of(None, chunk)
        if chunk.get("usage"):
            self._usage = _usage(chunk["usage"])
        deltas = map(self._delta, chunk.get("choices") or ())
        return [delta for delta in deltas if delta is not None]

    def results(self) -> list[Result]:
        """
        The outputs; usage of the first one counts the output tokens of all.

        Raises:
            NetworkError: the stream broke off.
        """
        if any(output.reason is None for output in self._outputs):
            raise NetworkError("the stream broke off before the output was whole")
        ttft_s = None if self._first_at is None else self._first_at - self._began_at
        e2e_s = perf_counter() - self._began_at
        usages = {0: self._usage}
        return [
            Result(
                text=text_of(output.parts, Content),
                token_ids=(),
                finish_reason=output.reason or FinishReason.STOP,
                usage=usages.get(index) or Usage(0, output.n_deltas, 0),
                timings=Timings(None, ttft_s, None, None, None, e2e_s),
                seed=None if self._seed is None else self._seed + index,
                index=index,
                logprobs=tuple(output.logprobs),
                reasoning=text_of(output.parts, Reasoning),
                tool_calls=calls_of(output.parts),
            )
            for index, output in enumerate(self._outputs)
        ]

    def _delta(self, choice: Mapping[str, Any]) -> Delta | None:
        index = _whole(choice.get("index") or 0, len(self._outputs) - 1)
        output = self._outputs[index]
        if reason := choice.get("finish_reason"):
            output.reason = _reason(_piece_of(reason), choice.get("x_finish"))
        message = choice.get("delta")
        new = message or {}
        parts: list[Part] = []
        # Services tell reasoning by one of several names; some by two, with the same text.
        thoughts = (new.get(name) for name in self._reasoning)
        if thought := next(filter(None, thoughts), None):
            parts.append(Reasoning(_piece_of(thought)))
        if text := new.get("content") if message is not None else choice.get("text"):
            parts.append(Content(_piece_of(text)))
        parts += [_call(call) for call in new.get("tool_calls") or ()]
        logprobs = _logprobs(choice.get("logprobs"))
        if not parts and not logprobs:
            return None
        self._first_at = self._first_at or perf_counter()
        output.parts += parts
        output.logprobs += logprobs
        output.n_deltas += 1
        chat_parts = tuple(parts) if message is not None else ()
        return Delta(text_of(parts, Content), (), index, tuple(logprobs), chat_parts)


def _piece_of(value: object) -> str:
    """*value*, which must be a text; halves of pairs of characters are marks instead."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text belongs")
    if value.isascii():
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _whole(value: object, limit: int) -> int:
    """*value*, which must be a whole number from 0 to *limit*; some services write 5.0."""
    is_number = type(value) in (int, float)
    number = int(value) if is_number else -1  # type: ignore[call-overload]
    if number != value or not 0 <= number <= limit:
        raise ValueError(f"{number} where 0 to {limit} belongs")
    return number


def _reason(reason_word: str, ours: object) -> FinishReason:
    if reason_word == "content_filter":
        raise ContentFiltered("the service withholds the output because of its content")
    reasons = (
        reason for word in (ours, reason_word) for reason in REASONS if reason == word
    )
    return next(reasons, FinishReason.STOP)  # as of calls of tools


def _call(call: Mapping[str, Any]) -> CallDelta:
    function = call.get("function") or {}
    call_id, name = call.get("id"), function.get("name")
    return CallDelta(
        index=_whole(call.get("index") or 0, MAX_CALLS),
        id=None if call_id is None else _piece_of(call_id),
        name=None if name is None else _piece_of(name),
        arguments=_piece_of(function.get("arguments") or ""),
    )


def _usage(fields: Mapping[str, Any]) -> Usage:
    of_prompt = fields.get("prompt_tokens_details") or {}
    of_output = fields.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=_whole(fields.get("prompt_tokens") or 0, MAX_COUNT),
        completion_tokens=_whole(fields.get("completion_tokens") or 0, MAX_COUNT),
        cached_tokens=_whole(of_prompt.get("cached_tokens") or 0, MAX_COUNT),
        reasoning_tokens=_whole(of_output.get("reasoning_tokens") or 0, MAX_COUNT),
    )


def _logprobs(fields: Mapping[str, Any] | None) -> list[TokenLogprobs]:
    """Entries of a chat, or of the legacy form, with the ids that are told."""
    if not fields:
        return []
    tokens, logprobs = fields.get("tokens") or (), fields.get("token_logprobs") or ()
    tops = fields.get("top_logprobs") or [None] * len(tokens)
    legacy = [
        {"token": token, "logprob": logprob, "top_logprobs": _listed(top or {})}
        for token, logprob, top in zip(tokens, logprobs, tops, strict=False)
        if logprob is not None
    ]
    return [_entry(entry) for entry in fields.get("content") or legacy]


def _listed(top: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"token": token, "logprob": logprob} for token, logprob in top.items()]


def _entry(fields: Mapping[str, Any]) -> TokenLogprobs:
    top = fields.get("top_logprobs") or ()
    return TokenLogprobs(
        token_id=_id(fields),
        logprob=_logprob(fields),
        top=tuple((_id(candidate), _logprob(candidate)) for candidate in top),
        piece=_piece(fields),
        top_pieces=tuple(map(_piece, top)),
    )


def _id(fields: Mapping[str, Any]) -> int:
    number = fields.get("id")
    return NOT_KNOWN if number is None else _whole(number, MAX_COUNT)


def _logprob(fields: Mapping[str, Any]) -> float:
    value = fields["logprob"]
    if type(value) not in (int, float) or isnan(value):
        raise TypeError("no number where a log-probability belongs")
    return float(value)


def _piece(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a token; bytes(5) would be five zeros, so only a list is one of bytes."""
    listed = fields.get("bytes")
    if listed is None:
        return _piece_of(fields["token"]).encode()
    return bytes([_whole(byte, 255) for byte in listed])
