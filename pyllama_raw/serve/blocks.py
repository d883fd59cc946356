"""An answer as a list of blocks, each of one kind: what is thought, what is said, a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pyllama_raw import Result
from pyllama_raw.replies.parts import CallDelta, Content, Part, Reasoning


class BlockKind(StrEnum):
    """Kinds of blocks."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of an answer."""

    kind: BlockKind
    index: int  # in the answer
    call_id: str = ""
    name: str = ""  # of the tool
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What is thought or said, or the arguments."""
        return "".join(self.pieces)


class NewPiece(NamedTuple):
    """A text that is new in *block*, which may begin with it."""

    block: Block
    text: str
    begins: bool


class Blocks:
    """The blocks of one answer; only the last one grows."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._call = -1  # the index of the call that is the last block

    def take(self, parts: Iterable[Part]) -> Iterator[NewPiece]:
        """Add *parts* to the end."""
        for part in parts:
            text = part.arguments if isinstance(part, CallDelta) else part.text
            kind = _kind(part)
            last = self.all[-1] if self.all else None
            begins = last is None or last.kind is not kind
            if isinstance(part, CallDelta):
                begins = begins or part.index != self._call
                self._call = part.index
            if begins:
                last = Block(kind, len(self.all))
                self.all.append(last)
            assert last is not None
            if isinstance(part, CallDelta) and begins:
                last.call_id, last.name = part.id or "", part.name or ""
            last.pieces.append(text)
            yield NewPiece(last, text, begins)


def blocks_of(result: Result) -> list[Block]:
    """The blocks of a whole answer: what is thought, what is said, and the calls."""
    parts: list[Part] = [Reasoning(result.reasoning)] if result.reasoning else []
    parts += [Content(result.text)] if result.text else []
    parts += [
        CallDelta(i, call.id, call.name, call.arguments)
        for i, call in enumerate(result.tool_calls)
    ]
    blocks = Blocks()
    for _ in blocks.take(parts):
        pass
    return blocks.all


def _kind(part: Part) -> BlockKind:
    if isinstance(part, CallDelta):
        return BlockKind.CALL
    return BlockKind.REASONING if isinstance(part, Reasoning) else BlockKind.TEXT
