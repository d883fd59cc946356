"""Writes an answer as a message of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from pyllama_raw import FinishReason, Result
from pyllama_raw.replies.parts import Content, Reasoning
from pyllama_raw.results import StopString
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.codec import Block, BlockCodec, blocks_of
from pyllama_raw.serve.events import named_event
from pyllama_raw.serve.failures import Failure

SIGNATURE = "unsigned"  # of thoughts; clients give it back with them


class MessagesCodec(BlockCodec):
    """Writes one answer."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        ids = {"id": f"msg_{uuid4().hex}", "model": asked.found.name}
        self._message: dict[str, Any] = {"type": "message", "role": "assistant", **ids}

    def begin(self, n_prompt: int) -> bytes:
        """The message without its content."""
        counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        usage = {"input_tokens": n_prompt, "output_tokens": 0} | counts
        end = {"stop_reason": None, "stop_sequence": None}
        message = self._message | {"content": [], **end, "usage": usage}
        return named_event("message_start", message=message) + named_event("ping")

    def ended(self, prompt: int, result: Result) -> bytes:
        """The end of the last block, and why the answer ended."""
        told = named_event("message_delta", delta=_end(result), usage=_usage(result))
        return super().ended(prompt, result) + told

    def failed(self, failure: Failure) -> bytes:
        """An error after the answer began."""
        return named_event("error", error=failure.of_message()["error"])

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:  # noqa: ARG002
        """The end of the message."""
        return named_event("message_stop")

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The message at once."""
        result = results[0][0]
        content = [_shown(block, block.text) for block in blocks_of(result)]
        told = {"content": content, **_end(result), "usage": _usage(result)}
        return self._message | told

    def _open(self, block: Block) -> bytes:
        begun = _shown(block, "", signature="")
        return named_event(
            "content_block_start", index=block.index, content_block=begun
        )

    def _grow(self, block: Block, text: str) -> bytes:
        if block.kind is Content:
            return _delta(block, "text", text=text)
        if block.kind is Reasoning:
            return _delta(block, "thinking", thinking=text)
        return _delta(block, "input_json", partial_json=text)

    def _close(self, block: Block, result: Result | None = None) -> bytes:  # noqa: ARG002
        signed = b""
        if block.kind is Reasoning:
            signed = _delta(block, "signature", signature=SIGNATURE)
        return signed + named_event("content_block_stop", index=block.index)


def _delta(block: Block, kind: str, **fields: str) -> bytes:
    delta = {"type": f"{kind}_delta", **fields}
    return named_event("content_block_delta", index=block.index, delta=delta)


def _shown(block: Block, text: str, signature: str = SIGNATURE) -> dict[str, Any]:
    if block.kind is Content:
        return {"type": "text", "text": text}
    if block.kind is Reasoning:
        return {"type": "thinking", "thinking": text, "signature": signature}
    call = {"id": block.call_id, "name": block.name, "input": _input(text)}
    return {"type": "tool_use", **call}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut, those that are there."""
    try:
        given = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def _usage(result: Result) -> dict[str, Any]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _end(result: Result) -> dict[str, Any]:
    """Why an answer ended; what cuts it and has no name there is a limit."""
    detail = result.finish_detail
    end: dict[str, Any] = {"stop_reason": "end_turn", "stop_sequence": None}
    if result.finish_reason is not FinishReason.STOP:
        end["stop_reason"] = "max_tokens"
    elif isinstance(detail, StopString):
        end |= {"stop_reason": "stop_sequence", "stop_sequence": detail.text}
    elif result.calls_tools:
        end["stop_reason"] = "tool_use"
    return end
