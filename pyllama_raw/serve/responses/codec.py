"""Writes an answer as a response of items; in a stream, each event has its number."""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from pyllama_raw import FinishReason, Result
from pyllama_raw.replies.parts import CallDelta, Content, Reasoning, is_json
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.codec import Block, BlockCodec, blocks_of, timings
from pyllama_raw.serve.events import named_event
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.responses.body import ResponsesBody

IDS = {Content: "msg", Reasoning: "rs", CallDelta: "fc"}
EVENTS = {  # of the text of a block
    Content: "response.output_text",
    Reasoning: "response.reasoning_text",
    CallDelta: "response.function_call_arguments",
}


class ResponsesCodec(BlockCodec):
    """Writes one answer."""

    def __init__(self, asked: Asked, body: ResponsesBody) -> None:
        super().__init__()
        self._response = _response(asked, body)
        self._key = uuid4().hex  # of the ids of items
        self._n_events = 0

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002 - usage comes at the end
        """The response without its items."""
        begun = self._response | {"status": "in_progress"}
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=begun) for kind in kinds)

    def failed(self, failure: Failure) -> bytes:
        """An error after the answer began."""
        error = {"code": "server_error", "message": failure.message}
        failed = self._response | {"status": "failed", "error": error}
        return self._event("response.failed", response=failed)

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """All of the response."""
        result = results[0][0]
        response = self._whole(result, self._blocks)
        times = timings(result, result.usage.completion_tokens)
        kind = f"response.{response['status']}"
        return self._event(kind, response=response, timings=times)

    def whole(self, results: Sequence[Sequence[Result]]) -> dict[str, Any]:
        """The response at once."""
        result = results[0][0]
        return self._whole(result, blocks_of(result))

    def _whole(self, result: Result, blocks: Sequence[Block]) -> dict[str, Any]:
        status = _status(result)
        lasts = [None for _ in blocks[1:]] + [result]
        ends = map(_item_status, blocks, lasts)
        items = map(self._item, blocks, ends, (block.text for block in blocks))
        told = {"status": status, "output": list(items), "usage": _usage(result)}
        if status == "completed":
            return self._response | told | {"completed_at": int(time())}
        cut = result.finish_reason
        details: dict[str, Any] = {"reason": "max_output_tokens"}
        if cut is not FinishReason.LENGTH:
            details = {"reason": None, "x_finish": str(cut)}
        return self._response | told | {"incomplete_details": details}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._n_events += 1
        return named_event(kind, sequence_number=self._n_events - 1, **fields)

    def _open(self, block: Block) -> bytes:
        item, is_call = self._item(block, "in_progress", ""), block.kind is CallDelta
        if not is_call:
            item["content"] = []
        kind = "response.output_item.added"
        frames = self._event(kind, output_index=block.index, item=item)
        if is_call:
            return frames
        place, part = self._place(block), _part(block, "")
        return frames + self._event("response.content_part.added", **place, part=part)

    def _grow(self, block: Block, text: str) -> bytes:
        kind, more = f"{EVENTS[block.kind]}.delta", _no_logprobs(block)
        return self._event(kind, **self._place(block), delta=text, **more)

    def _close(self, block: Block, result: Result | None = None) -> bytes:
        place, text = self._place(block), block.text
        more: dict[str, Any] = {"text": text} | _no_logprobs(block)
        if block.kind is CallDelta:
            more = {"name": block.name, "arguments": text}
        frames = self._event(f"{EVENTS[block.kind]}.done", **place, **more)
        if block.kind is not CallDelta:
            kind = "response.content_part.done"
            frames += self._event(kind, **place, part=_part(block, text))
        item = self._item(block, _item_status(block, result), text)
        kind = "response.output_item.done"
        return frames + self._event(kind, output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind is CallDelta else place | {"content_index": 0}

    def _id(self, block: Block) -> str:
        return f"{IDS[block.kind]}_{self._key}{block.index:04x}"

    def _item(self, block: Block, status: str, text: str) -> dict[str, Any]:
        told: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind is CallDelta:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return told | {"type": "function_call"} | call
        told["content"] = [_part(block, text)]
        if block.kind is Reasoning:
            return told | {"type": "reasoning", "summary": []}
        return told | {"type": "message", "role": "assistant"}


def _no_logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind is Content else {}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    more: dict[str, Any] = {"annotations": [], "logprobs": []}
    return {"type": "output_text", "text": text} | more


def _status(result: Result) -> str:
    is_cut = result.finish_reason is not FinishReason.STOP
    return "incomplete" if is_cut else "completed"


def _item_status(block: Block, result: Result | None) -> str:
    """The status of a block; *result* is that of the answer that ends with it."""
    if block.kind is CallDelta and not is_json(block.text):
        return "incomplete"  # the model may end its turn within a call
    return "completed" if result is None else _status(result)


def _usage(result: Result) -> dict[str, Any]:
    usage = result.usage
    cached = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _response(asked: Asked, body: ResponsesBody) -> dict[str, Any]:
    """What is known of the response before it begins."""
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time()),
        "model": asked.found.name,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": body.reasoning,
        "store": False,
        "temperature": asked.params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.functions,
        "top_p": asked.params.top_p,
        "usage": None,
    }
