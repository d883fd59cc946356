"""Answers to chats in OpenAI's words: content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyllama_raw import Delta, Result
from pyllama_raw.replies.parts import CallDelta, Content
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.openai.chat import ChatBody
from pyllama_raw.serve.openai.chunks import Chunks, reason_of
from pyllama_raw.serve.openai.logprobs import chat_logprobs
from pyllama_raw.serve.tools import tool_call


class ChatCodec(Chunks):
    """Writes the answer to a chat."""

    def __init__(
        self, asked: Asked, body: ChatBody, prompt: str | None, *, has_alias: bool
    ) -> None:
        kind = "chat.completion.chunk" if asked.streams else "chat.completion"
        super().__init__("chatcmpl", kind, asked, with_usage=body.wants_usage)
        self._reasoning = body.reasoning_names(has_alias=has_alias)
        self._lists = asked.params.logprobs is not None
        self._verbose = {} if prompt is None else {"__verbose": {"prompt": prompt}}

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002
        """The role of each output."""
        choice = _choice({"role": "assistant", "content": None})
        return b"".join(self.frame(index, choice) for index in range(self._n))

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """The new parts; log-probabilities are those of all tokens since the last ones."""
        choices = [_choice(told) for told in _told_of(delta, self._reasoning)]
        if self._lists and delta.logprobs:
            choices = choices or [_choice({})]
            choices[0]["logprobs"] = chat_logprobs(delta.logprobs)
        return b"".join(self.frame(delta.index, choice) for choice in choices)

    def ended(self, prompt: int, result: Result) -> bytes:  # noqa: ARG002
        """Why an output ended."""
        return self.frame(result.index, {"delta": {}, **reason_of(result)})

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The answer at once."""
        choices = [
            {
                "index": result.index,
                "message": _message_of(result, self._reasoning),
                "logprobs": chat_logprobs(result.logprobs) if self._lists else None,
                **reason_of(result),
            }
            for result in results[0]
        ]
        return self.answer(choices, results) | self._verbose


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"delta": delta, "finish_reason": None}


def _told_of(delta: Delta, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """
    Objects `delta` of a stream, one for each part.

    The name of a call comes once and before its arguments, because clients add texts up.

    Args:
        names: of fields that have the reasoning.
    """
    if not delta.parts and delta.text:  # it is not taken apart
        yield {"content": delta.text}
    for part in delta.parts:
        if not isinstance(part, CallDelta):
            is_content = isinstance(part, Content)
            yield dict.fromkeys(("content",) if is_content else names, part.text)
            continue
        if part.name is not None:
            begun = tool_call(part.id, part.name, "")
            yield {"tool_calls": [{"index": part.index, **begun}]}
        if part.arguments:
            more = {"index": part.index, "function": {"arguments": part.arguments}}
            yield {"tool_calls": [more]}


def _message_of(result: Result, names: Sequence[str]) -> dict[str, Any]:
    """The whole message; *names* are those of fields that have the reasoning."""
    told: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    if result.reasoning:
        told |= dict.fromkeys(names, result.reasoning)
    told["content"] += result.text
    if result.tool_calls:
        told["content"] = told["content"] or None
        told["tool_calls"] = [
            tool_call(call.id, call.name, call.arguments) for call in result.tool_calls
        ]
    return told
