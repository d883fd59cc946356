"""
Writers of answers: what dialects have in common, and parts that several of them write.

A codec writes one answer. Its frames are complete server-sent events; an empty one is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from pydantic_core import to_json

from pyllama_raw import Delta, Result
from pyllama_raw.replies.parser import CallDelta, Content, Part, Reasoning
from pyllama_raw.serve.failures import Failure

DONE = b"data: [DONE]\n\n"


class Codec(Protocol):
    """Output *index* of a delta or result is that of `n`, *prompt* that of the list of prompts."""

    def begin(self, n_prompt: int) -> bytes:
        """Frames before the first delta; the prompt has *n_prompt* tokens."""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Frames of new text."""

    def ended(self, prompt: int, result: Result) -> bytes:
        """Frames of the end of an output."""

    def failed(self, failure: Failure) -> bytes:
        """Frames of an error after the answer began."""

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """Frames when all is written."""

    def whole(self, results: Sequence[Sequence[Result]]) -> Any:
        """The answer at once, for a JSON encoder; results by prompt, then by index."""


def event(value: Any) -> bytes:
    """A frame with *value* as JSON on one line."""
    return b"data: %b\n\n" % to_json(value)


def named_event(name: str, /, **fields: Any) -> bytes:
    """A frame of an event that has its name in *fields*, too, as their type."""
    return b"event: %b\n%b" % (name.encode(), event({"type": name, **fields}))


# -- answers that are made of blocks -----------------------------------------------------


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of an answer."""

    kind: type[Part]
    index: int  # in the answer
    pieces: list[str]
    call_id: str = ""
    name: str = ""  # of the tool

    @classmethod
    def of(cls, part: Part, index: int) -> Self:
        """A block that begins with *part*."""
        if isinstance(part, CallDelta):
            tool = part.id or "", part.name or ""
            return cls(CallDelta, index, [part.arguments], *tool)
        return cls(type(part), index, [part.text])

    @property
    def text(self) -> str:
        """Thoughts, a text, or the arguments of a call."""
        return "".join(self.pieces)


def blocks_of(result: Result) -> list[Block]:
    """The blocks of a whole answer: thoughts, the text, and the calls."""
    parts: list[Part] = [Reasoning(result.reasoning)] if result.reasoning else []
    parts += [Content(result.text)] if result.text else []
    parts += [
        CallDelta(i, call.id, call.name, call.arguments)
        for i, call in enumerate(result.tool_calls)
    ]
    return [Block.of(part, index) for index, part in enumerate(parts)]


class Growth(NamedTuple):
    """The change of an answer by one part."""

    closed: Block | None  # the block before, if it is at its end
    block: Block
    is_new: bool  # the block begins
    text: str  # that is new in it


class Blocks:
    """The blocks of an answer that is being written; only the last one grows."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._last: object = None  # the kind and the call of the last block

    def take(self, part: Part) -> Growth:
        """Add *part* to the last block, or begin one with it."""
        text = part.arguments if isinstance(part, CallDelta) else part.text
        place = type(part), getattr(part, "index", None)
        if place == self._last:
            self.all[-1].pieces.append(text)
            return Growth(None, self.all[-1], False, text)
        closed = self.all[-1] if self.all else None
        self._last = place
        self.all.append(Block.of(part, len(self.all)))
        return Growth(closed, self.all[-1], True, text)


# -- times of an answer ------------------------------------------------------------------


def timings(result: Result, n_output: int) -> dict[str, float]:
    """
    Times of an answer, as llama.cpp's server tells them in all its dialects.

    The first output token belongs to the prompt.
    """
    n_cached = result.usage.cached_tokens
    n_prompt, times = result.usage.prompt_tokens - n_cached, result.timings
    n_drafted, n_accepted = result.usage.drafted_tokens, result.usage.accepted_tokens
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        **_speed("prompt", n_prompt, times.prefill_s),
        "predicted_n": n_output,
        **_speed("predicted", max(n_output - 1, 0), times.decode_s),
        **({"draft_n": n_drafted, "draft_n_accepted": n_accepted} if n_drafted else {}),
    }


def _speed(name: str, n: int, seconds: float | None) -> dict[str, float]:
    ms = 1e3 * (seconds or 0.0)
    return {
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": 1e3 * n / ms if ms else 0.0,
    }
