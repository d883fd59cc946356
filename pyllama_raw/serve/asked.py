"""
The one internal form of a request for text.

A dialect (a folder here) has pydantic models of its bodies that make an Asked, and a Codec
that writes the answer in the dialect's words. answer.py runs any of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyllama_raw import (
    ChatOptions,
    Prompt,
    PyllamaError,
    RequestOptions,
    SamplingParams,
)
from pyllama_raw.errors import (
    BadGrammar,
    BadMedia,
    BadSchema,
    InvalidRequest,
    PromptTooLong,
    Unsupported,
)
from pyllama_raw.options.sampling import CONSTRAINTS
from pyllama_raw.serve.service import Found

MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for, in the words of the engine."""

    found: Found
    prompts: tuple[Prompt, ...]  # one for a chat
    params: SamplingParams  # with n outputs for each prompt
    options: RequestOptions
    streams: bool
    names: Mapping[str, str] = field(default_factory=dict)
    """Fields of the body, by the names that errors of the engine have for them."""
    media: list[str] = field(default_factory=list)
    """The places of its images and sounds in the body."""
    old_media: list[dict[str, Any] | None] = field(default_factory=list)
    """For each of media: its part of the chat, if it is of the history."""
    origins: Sequence[str] = ()
    """The places of the messages in the body, if they are not `messages`."""

    async def count(self) -> int:
        """Tokens of all prompts."""
        count = self.found.engine.count
        while True:
            try:
                counts = [await count(each, **self.of_chat) for each in self.prompts]
                return sum(counts)
            except BadMedia as error:
                if not self.goes_on_without(error):
                    raise

    def goes_on_without(self, error: BadMedia) -> bool:
        """
        Put a short text in place of the medium that *error* is about, and go on.

        False: it is not of the history, which clients send again with each request.
        """
        at = error.index
        if at is None or not 0 <= at < len(self.old_media):
            return False
        part = self.old_media[at]
        if part is None:
            return False
        kind = part["type"]
        part.clear()
        part |= {"type": "text", "text": f"[{kind}]"}
        del self.media[at], self.old_media[at]
        return True

    async def shown(self) -> list[str]:
        """The prompts as the model gets them, with the names of control tokens."""
        engine, options = self.found.engine, self.of_chat
        tokens = [await engine.tokenize(prompt, **options) for prompt in self.prompts]
        return [await engine.detokenize(each, special=True) for each in tokens]

    @property
    def of_chat(self) -> Any:
        """Options of the chat template and of the reply."""
        names = ChatOptions.__annotations__
        return {n: value for n, value in self.options.items() if n in names}

    @property
    def narrowing(self) -> list[str]:
        """Fields of the body that may leave no token to choose from."""
        params, names = self.params, ("suppress_tokens", "logit_bias", *CONSTRAINTS)
        return [self.names.get(name, name) for name in names if getattr(params, name)]

    def param_of(self, error: PyllamaError) -> str | None:
        """The field of the body that *error* is about."""
        match error:
            case BadMedia(index=int(index)) if index < len(self.media):
                return self.media[index]
            case PromptTooLong():
                return self.names.get("prompt", "prompt")
            case BadGrammar():
                return self.names.get("grammar", "grammar")
            case InvalidRequest() | BadSchema():
                return self.names.get(error.name) or self._origin(error.name)
            case Unsupported():
                return self.names.get(error.operation)
        return None

    def _origin(self, place: str) -> str:
        """The message of the body that *place* in the chat comes from."""
        found = MESSAGE.match(place)
        at = int(found[1]) if found else len(self.origins)
        return self.origins[at] if at < len(self.origins) else place
