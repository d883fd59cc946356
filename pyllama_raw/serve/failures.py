"""
Answers as JSON, and errors as clients read them: a status, and an object with message, type, param and code.

Rules:
1. A client's mistake is 4xx and names the field in `param`.
2. A prompt that is too long has the type and the words of llama.cpp's server, and OpenAI's
   code, because clients look for either to shorten a chat.
3. 503 means that another time or another server may do; it has a Retry-After.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from math import ceil
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response
from typing_extensions import TypedDict

from pyllama_raw import PyllamaError
from pyllama_raw.errors import (
    AdapterLoadFailed,
    EngineStalled,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    TextTooLong,
    Unsupported,
)
from pyllama_raw.options.frozen import allowed

TYPES = {  # of errors, by status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

MESSAGES = "/v1/messages"  # is a dialect with other types
ANTHROPIC = {400: TYPES[400], 503: "overloaded_error", 504: "timeout_error"}

MAX_MESSAGE, MAX_PARAM = 2000, 200  # characters: names of fields are what clients write

ADVICE = {  # of errors whose own advice is for programs, by what is not supported
    "tools": "describe them in a message, or start the service with a --chat-template that "
    "prints tools, such as hermes",
    "chat messages": "start the service with --chat-template, such as chatml",
}
# Whether errors of the current request have their status in `code`, as llama-server's have; our own
# word is `reason` then.
NUMBERED: ContextVar[bool] = ContextVar("numbered", default=False)
# The id of the current request, which errors of Anthropic's API tell.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
NAMES = {
    "texts": "input",
    "token_ids": "tokens",
}  # of fields of bodies, by what the engine calls them


class JSON(Response):
    """A value that pydantic can write; halves of pairs of characters are marks instead."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        try:
            return to_json(content)
        except PydanticSerializationError:  # a name or text of the request comes back
            return to_json(whole_characters(content))


def whole_characters(value: Any) -> Any:
    """*value* of JSON with a mark in the place of each half of a pair of characters."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {
                whole_characters(name): whole_characters(item)
                for name, item in value.items()
            }
        case list() | tuple():
            return [whole_characters(item) for item in value]
    return value


class Failure(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            fields: further ones of the object.
        """
        message = (
            message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        )
        param = param and param[:MAX_PARAM]
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers, self.fields = dict(headers or {}), dict(fields or {})
        if status == 503:
            self.headers.setdefault("retry-after", "1")

    def body(self) -> dict[str, Any]:
        """The error, for a JSON encoder."""
        other = "server_error" if self.status >= 500 else TYPES[400]
        kind = TYPES.get(self.status, other)
        error = {"message": self.message, "type": kind, "param": self.param}
        if NUMBERED.get():
            code: dict[str, Any] = {"code": self.status, "reason": self.code}
            return {"error": error | code | self.fields}
        return {"error": error | {"code": self.code} | self.fields}

    def answer(self, path: str) -> JSON:
        """The whole of it, in the words of the dialect at *path*."""
        body = self.of_message() if MESSAGES in path else self.body()
        return JSON(body, self.status, self.headers)

    def of_message(self) -> dict[str, Any]:
        """The error in the words of Anthropic's API, with ours beside them."""
        error = self.body()["error"]
        other = "api_error" if self.status >= 500 else error["type"]
        error["type"] = ANTHROPIC.get(self.status, other)
        request_id = REQUEST_ID.get() or None
        return {"type": "error", "error": error, "request_id": request_id}


class ErrorText(TypedDict):
    """An error, for programs and for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The answer if something goes wrong."""

    error: ErrorText


DESCRIBED: dict[int | str, dict[str, Any]] = {  # for the OpenAPI description
    "4XX": {"model": ErrorBody, "description": "The request is wrong, or has to wait"},
    "5XX": {"model": ErrorBody, "description": "The service cannot answer now"},
}


def refused(param: str, reason: str, code: str = "invalid_request") -> Failure:
    """The mistake of a client in the field *param*."""
    return Failure(400, code, f"{param}: {reason}", param)


def words_of(mistakes: Sequence[Any]) -> str:
    """
    What fits in a place, in words, by the *mistakes* that pydantic found there.

    A value that fits no branch of a union has one for each.
    """
    if len(mistakes) == 1:
        return str(mistakes[0]["msg"])
    return "give " + ", or ".join(dict.fromkeys(map(allowed, mistakes)))


def failure_of(error: PyllamaError, retry_s: int) -> Failure:
    """
    An error of the engine as a client is told of it.

    Args:
        retry_s: seconds after which the same request may find room.
    """
    match error:
        case PromptTooLong():
            return _too_long(error, "prompt", error.n_prompt, error.n_ctx_slot)
        case TextTooLong():
            name = renamed(error.name, NAMES)
            return _too_long(error, name, error.n_tokens, error.max_tokens)
        case InvalidRequest() if error.name.endswith(".role"):
            # Claude Code looks for these words, and goes on without such messages.
            message = (
                f"role {error.value!r} is not supported here: give {error.allowed}"
            )
            return Failure(400, error.code, message, error.name)
        case InvalidRequest():
            param = renamed(error.name, NAMES)
        case Unsupported() if error.operation in ADVICE and error.advice:
            advice = ADVICE[error.operation]
            message = f"{error.operation}: {error.why}: {advice}"
            return Failure(400, error.code, message, "model")
        case Unsupported():
            param = "model"
        case AdapterLoadFailed():
            param = "path"
        case _:
            retry_s = ceil(getattr(error, "retry_after_s", None) or retry_s)
            headers = {"retry-after": str(retry_s)} if error.http_status == 503 else {}
            code, message = error.code, str(error)
            if isinstance(error, QueueFull | EngineStalled):
                # How much waits and runs is the business of others; logs and metrics tell it.
                message = "all places of the queue are taken: try again, or elsewhere"
            if isinstance(error, QueueFull):
                code = "server_is_overloaded"
            return Failure(error.http_status, code, message, headers=headers)
    return Failure(400, error.code, str(error), param)


def _too_long(
    error: PyllamaError, param: str, n_tokens: int, max_tokens: int
) -> Failure:
    fields: dict[str, Any] = {"type": "exceed_context_size_error"}
    fields |= {"n_prompt_tokens": n_tokens, "n_ctx": max_tokens}
    words = "the prompt is too large, it exceeds the available context size"
    message = f"{words}: {error}"
    return Failure(400, "context_length_exceeded", message, param, fields=fields)


def renamed(param: str, names: Mapping[str, str]) -> str:
    """*param* with the name that *names* have for it; a place in a list stays."""
    base, *place = param.partition("[")
    return names.get(base, base) + "".join(place)
