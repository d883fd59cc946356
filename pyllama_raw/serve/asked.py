"""
The one internal form of a request for text, and of the writer of its answer.

A dialect (a folder or module here) has a pydantic model of its body that makes an Asked, and
a Codec that writes the answer in the dialect's words. answer.py runs any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyllama_raw import (
    ChatOptions,
    Delta,
    Prompt,
    PyllamaError,
    RequestOptions,
    Result,
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
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.service import Found


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
    media: Sequence[str] = ()
    """The places of its images and sounds in the body."""

    async def count(self) -> int:
        """Tokens of all prompts."""
        count = self.found.engine.count
        return sum([await count(prompt, **self._of_chat) for prompt in self.prompts])

    async def shown(self) -> str:
        """The first prompt as the model gets it, with the names of control tokens."""
        engine = self.found.engine
        tokens = await engine.tokenize(self.prompts[0], **self._of_chat)
        return await engine.detokenize(tokens, special=True)

    @property
    def _of_chat(self) -> Any:
        names = ChatOptions.__annotations__
        return {n: value for n, value in self.options.items() if n in names}

    def param_of(self, error: PyllamaError) -> str | None:
        """The field of the body that *error* is about."""
        match error:
            case BadMedia(index=int(index)) if index < len(self.media):
                return self.media[index]
            case PromptTooLong():
                return self.names.get("prompt", "prompt")
            case BadGrammar():
                return "grammar"
            case InvalidRequest() | BadSchema():
                return self.names.get(error.name, error.name)
            case Unsupported():
                return self.names.get(error.operation)
        return None


class Codec(Protocol):
    """
    Writes one answer. Output *index* is that of `n`, *prompt* that of the list of prompts.

    Frames are complete events; an empty one is not sent.
    """

    def begin(self) -> bytes:
        """Frames before the first delta."""
        ...

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Frames of new text."""
        ...

    def ended(self, prompt: int, result: Result) -> bytes:
        """Frames of the end of an output."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """Frames of an error after the answer began."""
        ...

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:
        """Frames when all is written."""
        ...

    def whole(self, results: Sequence[Sequence[Result]]) -> Any:
        """The answer at once, for a JSON encoder; results by prompt, then by index."""
        ...
