"""Takes a reply apart while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyllama_raw.replies.parts import Content, Part
from pyllama_raw.replies.spec import ReplySpec


class ReplyParser:
    """
    Takes one reply apart while it is generated.

    Args:
        spec: how the model writes. `spec.bound(is_special)` says which of its delimiters are
            special tokens; in one that is not bound, all delimiters are matched as text.
        tools: the tools of the request, as OpenAI's API has them. They give the types of
            arguments; calls without a delimiter are known by their names alone.
        prefix: the end of the prompt after its last message, which may begin reasoning.
        calls: whether calls are taken out; without, they are text of the content.
        new_id: makes the id of a call in formats that write none.
    """

    def __init__(
        self,
        spec: ReplySpec,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: str = "",
        calls: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        raise NotImplementedError

    def feed(self, text: str, special: bool = False) -> list[Part]:
        """
        The parts that *text*, the next of the reply, adds.

        Args:
            text: the next text, or with *special* the name of one special token in `spec.special`.
            special: *text* is such a token. Other tokens are fed as the text that they show.
        """
        return [Content(text)]

    def finish(self) -> list[Part]:
        """The parts that the end of the reply adds. What is cut stays as it is."""
        return []
