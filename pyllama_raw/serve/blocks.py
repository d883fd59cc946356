"""Answers as lists of blocks, each of one kind: what is thought, what is said, a call."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

from pyllama_raw import Delta, Result
from pyllama_raw.replies.parts import CallDelta, Content, Part, Reasoning
from pyllama_raw.serve.codec import Codec


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
