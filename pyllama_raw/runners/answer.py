"""Answers of services that are like OpenAI's, chunk by chunk, in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from pyllama_raw.api.results import Delta, Result, Timings, Usage
from pyllama_raw.core.request import FinishReason, TokenLogprobs
from pyllama_raw.errors import PromptTooLong, PyllamaError, Unsupported
from pyllama_raw.replies.parts import (
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

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
}
STATUSES = {  # of errors within a stream, by type or code
    "rate_limit_error": 429,
    "authentication_error": 401,
    "service_unavailable_error": 503,
}
BUSY = ("server_is_overloaded", "queue_full")  # codes of load, which is no failure
NOT_KNOWN = -1  # the id of a token of which only its text is told


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

    Args:
        n: outputs that were asked for.
        reasoning: names of fields with reasoning.
    """

    def __init__(self, n: int, reasoning: Sequence[str], seed: int | None) -> None:
        self._outputs = {index: _Output() for index in range(n)}
        self._reasoning, self._seed = reasoning, seed or 0
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
        deltas = [self._delta(choice) for choice in chunk.get("choices") or ()]
        return [delta for delta in deltas if delta is not None]

    def results(self) -> list[Result]:
        """
        The outputs; usage of the first one counts the output tokens of all.

        Raises:
            NetworkError: the stream broke off.
        """
        now = perf_counter()
        if any(output.reason is None for output in self._outputs.values()):
            raise NetworkError("the stream broke off before the output was whole")
        ttft_s = None if self._first_at is None else self._first_at - self._began_at
        timings = Timings(None, ttft_s, None, None, None, now - self._began_at)
        return [
            self._result(index, output, timings)
            for index, output in sorted(self._outputs.items())
        ]

    def _result(self, index: int, output: _Output, timings: Timings) -> Result:
        counted = Usage(0, output.n_deltas, 0)
        usage = (self._usage or counted) if index == 0 else counted
        return Result(
            text=text_of(output.parts, Content),
            token_ids=(),
            finish_reason=output.reason or FinishReason.STOP,
            usage=usage,
            timings=timings,
            seed=self._seed + index,
            index=index,
            logprobs=tuple(output.logprobs),
            reasoning=text_of(output.parts, Reasoning),
            tool_calls=calls_of(output.parts),
        )

    def _delta(self, choice: Mapping[str, Any]) -> Delta | None:
        index = int(choice.get("index") or 0)
        output = self._outputs.setdefault(index, _Output())
        if reason := choice.get("finish_reason"):
            output.reason = _reason(reason, choice.get("x_finish"))
        said = choice.get("delta")
        new = said or {}
        parts = [Reasoning(new[n]) for n in self._reasoning if new.get(n)][:1]
        found: list[Part] = [*parts]
        if text := new.get("content") if said is not None else choice.get("text"):
            found.append(Content(text))
        found += [_call(call) for call in new.get("tool_calls") or ()]
        logprobs = _logprobs(choice.get("logprobs"))
        if not found and not logprobs:
            return None
        self._first_at = self._first_at or perf_counter()
        output.parts += found
        output.logprobs += logprobs
        output.n_deltas += 1
        shown = tuple(found) if said is not None else ()
        return Delta(text_of(found, Content), (), index, tuple(logprobs), shown)


def _reason(told: str, ours: str | None) -> FinishReason:
    if told == "content_filter":
        raise ContentFiltered("the service withholds the output because of its content")
    if ours is not None and ours in tuple(FinishReason):
        return FinishReason(ours)
    return REASONS.get(told, FinishReason.STOP)


def _call(call: Mapping[str, Any]) -> CallDelta:
    function = call.get("function") or {}
    return CallDelta(
        index=int(call.get("index") or 0),
        id=call.get("id"),
        name=function.get("name"),
        arguments=function.get("arguments") or "",
    )


def _usage(told: Mapping[str, Any]) -> Usage:
    of_prompt = told.get("prompt_tokens_details") or {}
    of_output = told.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=int(told.get("prompt_tokens") or 0),
        completion_tokens=int(told.get("completion_tokens") or 0),
        cached_tokens=int(of_prompt.get("cached_tokens") or 0),
        reasoning_tokens=int(of_output.get("reasoning_tokens") or 0),
    )


def _logprobs(told: Mapping[str, Any] | None) -> list[TokenLogprobs]:
    """Entries of a chat, or of the legacy form, with the ids that are told."""
    if not told:
        return []
    if told.get("content"):
        return [
            _entry(each, each.get("top_logprobs") or ()) for each in told["content"]
        ]
    tops = told.get("top_logprobs") or [None] * len(told.get("tokens") or ())
    rows = zip(
        told.get("tokens") or (), told.get("token_logprobs") or (), tops, strict=False
    )
    return [
        _entry(
            {"token": token, "logprob": logprob},
            [{"token": t, "logprob": p} for t, p in (top or {}).items()],
        )
        for token, logprob, top in rows
        if logprob is not None
    ]


def _entry(told: Mapping[str, Any], top: Sequence[Mapping[str, Any]]) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=told.get("id", NOT_KNOWN),
        logprob=told["logprob"],
        top=tuple((each.get("id", NOT_KNOWN), each["logprob"]) for each in top),
        piece=_piece(told),
        top_pieces=tuple(map(_piece, top)),
    )


def _piece(told: Mapping[str, Any]) -> bytes:
    given = told.get("bytes")
    return bytes(given) if given is not None else str(told["token"]).encode()


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
