"""Answers of services that are like OpenAI's, chunk by chunk, in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from time import perf_counter
from typing import Any

from pyllama_raw.api.results import Delta, Result, Timings, Usage
from pyllama_raw.core.request import FinishReason, TokenLogprobs
from pyllama_raw.replies.parts import (
    CallDelta,
    Content,
    Part,
    Reasoning,
    calls_of,
    text_of,
)
from pyllama_raw.runners.connection import error_of
from pyllama_raw.runners.errors import ContentFiltered, NetworkError, UnexpectedAnswer

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
            output.reason = _reason(_text(reason), choice.get("x_finish"))
        message = choice.get("delta")
        new = message or {}
        parts: list[Part] = []
        # Services tell reasoning by one of several names; some by two, with the same text.
        thoughts = (new.get(name) for name in self._reasoning)
        if thought := next(filter(None, thoughts), None):
            parts.append(Reasoning(_text(thought)))
        if text := new.get("content") if message is not None else choice.get("text"):
            parts.append(Content(_text(text)))
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


def _text(value: object) -> str:
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
        id=None if call_id is None else _text(call_id),
        name=None if name is None else _text(name),
        arguments=_text(function.get("arguments") or ""),
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
        return _text(fields["token"]).encode()
    return bytes([_whole(byte, 255) for byte in listed])
