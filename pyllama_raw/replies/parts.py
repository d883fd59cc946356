"""Parts of a reply, in the order in which the model wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str
    """The new text, never empty."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str
    """The new text, never empty."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """
    A piece of the call of a tool.

    The first piece of a call has its id and its name, once; the pieces of arguments that follow
    are JSON when they are put together.
    """

    index: int
    """The number of the call in its reply, from 0."""
    id: str | None = None
    """The id of the call; None after the first piece."""
    name: str | None = None
    """The name of the tool; None after the first piece."""
    arguments: str = ""
    """The next piece of the arguments."""


Part = Content | Reasoning | CallDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written."""

    id: str
    """An id that its result is given with."""
    name: str
    """The name of the tool."""
    arguments: str
    """The arguments as JSON; cut off if the reply was."""

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are JSON; else the reply was cut, or the model is wrong."""
        return is_json(self.arguments)


def is_json(text: str) -> bool:
    """Whether *text* is one value of JSON."""
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return True


def _refused(constant: str) -> object:
    raise ValueError(constant)  # NaN and infinity, which JSON has not


def text_of(parts: Iterable[Part], kind: type[Content] | type[Reasoning]) -> str:
    """The text of all *parts* of this kind."""
    return "".join(part.text for part in parts if isinstance(part, kind))


def calls_of(parts: Iterable[Part]) -> tuple[ToolCall, ...]:
    """The calls that *parts* make up, by index."""
    calls: dict[int, list[CallDelta]] = {}
    for part in parts:
        if isinstance(part, CallDelta):
            calls.setdefault(part.index, []).append(part)
    return tuple(
        ToolCall(
            id="".join(delta.id or "" for delta in deltas),
            name="".join(delta.name or "" for delta in deltas),
            arguments="".join(delta.arguments for delta in deltas),
        )
        for _, deltas in sorted(calls.items())
    )
