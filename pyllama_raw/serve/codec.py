"""Writers of answers: what they have in common, in whatever dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pyllama_raw import Delta, Result
from pyllama_raw.replies.parts import CallDelta, Content, Part, Reasoning
from pyllama_raw.serve.events import event
from pyllama_raw.serve.failures import Failure


class Codec(ABC):
    """
    Writes one answer. Output *index* is that of `n`, *prompt* that of the list of prompts.

    Frames are complete events; an empty one is not sent.
    """

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002
        """Frames before the first delta; the prompt has *n_prompt* tokens."""
        return b""

    @abstractmethod
    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Frames of new text."""

    @abstractmethod
    def ended(self, prompt: int, result: Result) -> bytes:
        """Frames of the end of an output."""

    def failed(self, failure: Failure) -> bytes:
        """Frames of an error after the answer began."""
        return event(failure.body())

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:  # noqa: ARG002
        """Frames when all is written."""
        return b""

    @abstractmethod
    def whole(self, results: Sequence[Sequence[Result]]) -> Any:
        """The answer at once, for a JSON encoder; results by prompt, then by index."""


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
            named = part.id or "", part.name or ""
            return cls(CallDelta, index, [part.arguments], *named)
        return cls(type(part), index, [part.text])

    @property
    def text(self) -> str:
        """What is thought or said, or the arguments."""
        return "".join(self.pieces)


def blocks_of(result: Result) -> list[Block]:
    """The blocks of a whole answer: what is thought, what is said, and the calls."""
    parts: list[Part] = [Reasoning(result.reasoning)] if result.reasoning else []
    parts += [Content(result.text)] if result.text else []
    parts += [
        CallDelta(i, call.id, call.name, call.arguments)
        for i, call in enumerate(result.tool_calls)
    ]
    return [Block.of(part, index) for index, part in enumerate(parts)]


class BlockCodec(Codec):
    """Writes one answer of blocks; only the last one grows."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._last: object = None  # the kind and the call of the last block

    def delta(self, prompt: int, delta: Delta) -> bytes:  # noqa: ARG002 - there is one
        """What is new in the blocks."""
        return b"".join(map(self._take, delta.parts))

    def ended(self, prompt: int, result: Result) -> bytes:  # noqa: ARG002
        """The end of the last block."""
        return self._close(self._blocks[-1], result) if self._blocks else b""

    @abstractmethod
    def _open(self, block: Block) -> bytes:
        """Frames of a new block, without its text."""

    @abstractmethod
    def _grow(self, block: Block, text: str) -> bytes:
        """Frames of the *text* that is new in a block."""

    @abstractmethod
    def _close(self, block: Block, result: Result | None = None) -> bytes:
        """Frames of the end of a block; that of the last one is the end of *result*."""

    def _take(self, part: Part) -> bytes:
        text = part.arguments if isinstance(part, CallDelta) else part.text
        kind, call = type(part), getattr(part, "index", None)
        frames = b""
        if (kind, call) == self._last:
            self._blocks[-1].pieces.append(text)
        else:
            if self._blocks:
                frames = self._close(self._blocks[-1])
            self._last = kind, call
            self._blocks.append(Block.of(part, len(self._blocks)))
            frames += self._open(self._blocks[-1])
        return frames + self._grow(self._blocks[-1], text) if text else frames


def timings(result: Result, n_output: int) -> dict[str, float]:
    """
    Times of an answer, as llama.cpp's server tells them in all its dialects.

    The first output token belongs to the prompt.
    """
    n_cached = result.usage.cached_tokens
    n_prompt, times = result.usage.prompt_tokens - n_cached, result.timings
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        **_speed("prompt", n_prompt, times.prefill_s),
        "predicted_n": n_output,
        **_speed("predicted", max(n_output - 1, 0), times.decode_s),
    }


def _speed(name: str, n: int, seconds: float | None) -> dict[str, float]:
    ms = 1e3 * (seconds or 0.0)
    return {
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": 1e3 * n / ms if ms else 0.0,
    }
