"""
The one internal form of a request for text, and of the writer of its answer.

A dialect (a folder or module here) has a pydantic model of its body that makes an Asked, and
a Codec that writes the answer in the dialect's words. answer.py runs any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyllama_raw import Delta, Prompt, Result, SamplingParams
from pyllama_raw.options.requests import RequestOptions
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
