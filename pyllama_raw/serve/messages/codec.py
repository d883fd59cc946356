"""Writes an answer as a message of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from pyllama_raw import Delta, FinishReason, Result
from pyllama_raw.replies.parts import Part
from pyllama_raw.results import StopString
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.blocks import Block, BlockKind, Blocks, blocks_of
from pyllama_raw.serve.events import named_event
from pyllama_raw.serve.failures import Failure

SIGNATURE = "unsigned"  # of thoughts; clients give it back with them
EMPTY: dict[BlockKind, dict[str, Any]] = {
    BlockKind.TEXT: {"type": "text", "text": ""},
    BlockKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    BlockKind.CALL: {"type": "tool_use", "input": {}},
}
DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesCodec:
    """Writes one answer."""

    def __init__(self, asked: Asked) -> None:
        self._id, self._model = f"msg_{uuid4().hex}", asked.found.name
        self._blocks = Blocks()

    def begin(self, n_prompt: int) -> bytes:
        """The message without its content."""
        counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        usage = {"input_tokens": n_prompt, "output_tokens": 0} | counts
        end = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], usage, end)
        return named_event("message_start", message=message) + named_event("ping")

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """What is new in the blocks."""
        return b"".join(self._frames(delta.parts))

    def ended(self, prompt: int, result: Result) -> bytes:  # noqa: ARG002
        """The end of the last block, and why the answer ended."""
        frames = self._stop() if self._blocks.all else b""
        ended = named_event("message_delta", delta=_end(result), usage=_usage(result))
        return frames + ended

    def failed(self, failure: Failure) -> bytes:
        """An error after the answer began."""
        return named_event("error", error=failure.of_message()["error"])

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:  # noqa: ARG002
        """The end of the message."""
        return named_event("message_stop")

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The message at once."""
        result = results[0][0]
        content = [_shown(block) for block in blocks_of(result)]
        return self._message(content, _usage(result), _end(result))

    def _message(
        self, content: list[Any], usage: dict[str, Any], end: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": usage,
        }

    def _frames(self, parts: Iterable[Part]) -> Iterator[bytes]:
        for block, text, begins in self._blocks.take(parts):
            if begins:
                if block.index:
                    yield self._stop(block.index - 1)
                begun = EMPTY[block.kind] | _named(block)
                yield named_event(
                    "content_block_start", index=block.index, content_block=begun
                )
            if text:
                kind, name = DELTAS[block.kind]
                yield _delta(block, {"type": kind, name: text})

    def _stop(self, index: int = -1) -> bytes:
        block, frames = self._blocks.all[index], b""
        if block.kind is BlockKind.REASONING:
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            frames = _delta(block, signed)
        return frames + named_event("content_block_stop", index=block.index)


def _delta(block: Block, delta: dict[str, Any]) -> bytes:
    return named_event("content_block_delta", index=block.index, delta=delta)


def _named(block: Block) -> dict[str, Any]:
    is_call = block.kind is BlockKind.CALL
    return {"id": block.call_id, "name": block.name} if is_call else {}


def _shown(block: Block) -> dict[str, Any]:
    told = EMPTY[block.kind] | _named(block)
    match block.kind:
        case BlockKind.TEXT:
            return told | {"text": block.text}
        case BlockKind.REASONING:
            return told | {"thinking": block.text, "signature": SIGNATURE}
    return told | {"input": _input(block.text)}


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
    elif result.tool_calls:
        end["stop_reason"] = "tool_use"
    return end
