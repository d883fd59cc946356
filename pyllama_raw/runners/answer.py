"""Answers of services that are like OpenAI's, chunk by chunk, in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        deltas = map(self._delta, chunk.get("choices") or ())
        return [delta for delta in deltas if delta is not None]

    def results(self) -> list[Result]:
        """
        The outputs; usage of the first one counts the output tokens of all.

        Raises:
            NetworkError: the stream broke off.
        """
        if any(output.reason is None for output in self._outputs.values()):
            raise NetworkError("the stream broke off before the output was whole")
        ttft_s = None if self._first_at is None else self._first_at - self._began_at
        e2e_s = perf_counter() - self._began_at
        told = {0: self._usage}
        return [
            Result(
                text=text_of(output.parts, Content),
                token_ids=(),
                finish_reason=output.reason or FinishReason.STOP,
                usage=told.get(index) or Usage(0, output.n_deltas, 0),
                timings=Timings(None, ttft_s, None, None, None, e2e_s),
                seed=self._seed + index,
                index=index,
                logprobs=tuple(output.logprobs),
                reasoning=text_of(output.parts, Reasoning),
                tool_calls=calls_of(output.parts),
            )
            for index, output in sorted(self._outputs.items())
        ]

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
    known = (FinishReason(word) for word in (ours, told) if word in REASONS)
    return next(known, FinishReason.STOP)  # as of calls of tools


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
    tokens, logprobs = told.get("tokens") or (), told.get("token_logprobs") or ()
    tops = told.get("top_logprobs") or [None] * len(tokens)
    legacy = [
        {"token": token, "logprob": logprob, "top_logprobs": _listed(top or {})}
        for token, logprob, top in zip(tokens, logprobs, tops, strict=False)
        if logprob is not None
    ]
    return [_entry(each) for each in told.get("content") or legacy]


def _listed(top: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"token": token, "logprob": logprob} for token, logprob in top.items()]


def _entry(told: Mapping[str, Any]) -> TokenLogprobs:
    top = told.get("top_logprobs") or ()
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
