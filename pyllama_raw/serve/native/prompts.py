"""Prompts as llama.cpp's server takes them: texts, token ids, and both mixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.failures import Failure


class PromptString(BaseModel):
    """A text as an object; images and sounds beside it belong in a chat."""

    model_config = ConfigDict(extra="forbid")

    prompt_string: str


TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Mixed = list[TokenId | str]  # of one prompt
Prompts = str | PromptString | list[TokenId | str | PromptString | Mixed]


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the model gets it."""

    tokens: list[int]
    text: str

    @classmethod
    async def of(cls, engine: AsyncEngine, tokens: list[int]) -> ReadPrompt:
        """With the text that *tokens* stand for."""
        return cls(tokens, await engine.detokenize(tokens, special=True))


async def read_prompts(engine: AsyncEngine, given: Prompts) -> list[ReadPrompt]:
    """
    Each of *given*: a list that has a token id is one prompt, other lists are of prompts.

    Raises:
        Failure, InvalidRequest, PromptTooLong.
    """
    if not isinstance(given, list) or any(isinstance(item, int) for item in given):
        return [await ReadPrompt.of(engine, await _tokens(engine, given))]
    if not given:
        raise Failure(400, "invalid_request", "prompt: give at least one", "prompt")
    return [await ReadPrompt.of(engine, await _tokens(engine, p)) for p in given]


async def _tokens(engine: AsyncEngine, given: object) -> list[int]:
    """A text at the beginning gets what begins prompts."""
    tokens: list[int] = []
    for index, item in enumerate(given if isinstance(given, list) else [given]):
        if isinstance(item, int):
            tokens.append(item)
            continue
        text = item.prompt_string if isinstance(item, PromptString) else item
        if not isinstance(text, str):
            message = "prompt: a list with token ids may have texts beside them"
            raise Failure(400, "invalid_request", message, "prompt")
        tokens += await engine.tokenize(text, add_special=index == 0)
    return tokens
