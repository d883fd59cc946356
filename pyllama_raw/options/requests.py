"""What a request may say beside its prompt and its sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

PolicyData = Mapping[str, str | int | float | bool | None]

Need = Literal["generate", "embed", "rank"]  # what a model must be able to do


class ChatOptions(TypedDict, total=False):
    """How the template makes a prompt of chat messages; nothing for other prompts."""

    tools: Sequence[Mapping[str, Any]] | None
    """Functions that the model may call, as JSON schemas."""
    template_kwargs: Mapping[str, Any] | None
    """More variables of the chat template."""
    chat_template: str | None
    """A Jinja template to use instead of the model's own."""


class TextOptions(TypedDict, total=False):
    """How a request is served."""

    priority: int
    """Requests with a lower number run first; 0 by default."""
    deadline_s: float | None
    """Seconds from now after which the request ends with what it has. None: never."""


class RequestOptions(TextOptions, ChatOptions, total=False):
    """How a request is served; but for adapters and those of chats nothing here changes its output."""

    adapters: Mapping[str, float] | None
    """Loaded adapters by name, each with the scale of its effect; 0 is as if left out."""
    cache_salt: str | None
    """Only requests with an equal salt share cached prefixes."""
    cache_points: Iterable[int]
    """Positions of the prompt that are worth a snapshot."""
    client: str | None
    """Who sends the request, for policies that are fair by client."""
    policy_data: PolicyData | None
    """What else a scheduling policy may know of the request."""
