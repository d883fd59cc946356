"""What answers in OpenAI's words have in common."""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from pydantic_core import to_json

from pyllama_raw import FinishReason, Result
from pyllama_raw.serve.asked import Asked
from pyllama_raw.serve.codec import Codec, timings
from pyllama_raw.serve.events import DONE, event


def usage(results: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """Tokens of each prompt, which its outputs share, and of all outputs."""
    n_prompt = sum(of_prompt[0].usage.prompt_tokens for of_prompt in results)
    n_cached = sum(of_prompt[0].usage.cached_tokens for of_prompt in results)
    outputs = [each for of_prompt in results for each in of_prompt]
    n_output = sum(each.usage.completion_tokens for each in outputs)
    n_reasoning = sum(each.usage.reasoning_tokens for each in outputs)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {"reasoning_tokens": n_reasoning},
    }


def reason_of(result: Result) -> dict[str, Any]:
    """Why an output ended, in the words that clients know, and in ours if there are none."""
    if result.finish_reason is FinishReason.STOP:
        return {"finish_reason": "tool_calls" if result.tool_calls else "stop"}
    told = {"finish_reason": "length"}  # all others cut the text
    if result.finish_reason is not FinishReason.LENGTH:
        told["x_finish"] = str(result.finish_reason)
    return told


class Chunks(Codec):
    """
    Writes frames of one answer. The prefix, which all have in common, is rendered once.

    Args:
        kind: of the object, such as "chat.completion.chunk".
        with_usage: whether a stream ends with the counts of tokens.
    """

    def __init__(
        self, prefix: str, kind: str, asked: Asked, *, with_usage: bool
    ) -> None:
        self.head = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time()),
            "model": asked.found.name,
        }
        self._n, self._with_usage = asked.params.n, with_usage
        self._before = b"data: %b" % to_json(self.head)[:-1] + b',"choices":[{"index":'
        self._after = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"

    def frame(self, index: int, choice: dict[str, Any]) -> bytes:
        """An event with one choice, whose other fields are in *choice*."""
        fields = to_json(choice)[1:-1]
        return b"%b%d,%b%b" % (self._before, index, fields, self._after)

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """The counts of tokens, if they are wanted, and the end."""
        if not self._with_usage:
            return DONE
        return event(self.answer([], results)) + DONE

    def answer(
        self, choices: list[dict[str, Any]], results: Sequence[Sequence[Result]]
    ) -> dict[str, Any]:
        """An object with *choices*, the counts of all outputs, and times of the first one."""
        first = results[0][0]
        times = timings(first, first.usage.completion_tokens)
        told = {"choices": choices, "usage": usage(results), "timings": times}
        return self.head | told
