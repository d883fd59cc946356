"""Prompts as llama.cpp's server takes them: texts, token ids, and both mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.body import Exact, Items
from pyllama_raw.serve.failures import refused


class PromptString(Exact):
    """A text as an object; images and sounds beside it belong in a chat."""

    prompt_string: str

    @property
    def text(self) -> str:
        """What stands in a list for it."""
        return self.prompt_string


class PromptPart(Exact):
    """A piece of a text."""

    type: Literal["text"]
    text: str


class PromptParts(Exact):
    """A text in parts, as of a message of a chat."""

    content: Annotated[list[PromptPart], Field(min_length=1, fail_fast=True)]

    @property
    def text(self) -> str:
        """All parts, one behind the other."""
        return "".join(part.text for part in self.content)


TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Mixed = Items[TokenId | str]  # of one prompt
TextObject = PromptString | PromptParts
Prompts = str | TextObject | Items[TokenId | str | TextObject | Mixed]


def prompts_of(given: Prompts, name: str = "prompt") -> list[Any]:
    """Each prompt of *given*. Raises Failure if there is none in the field *name*."""
    if not isinstance(given, list) or any(isinstance(item, int) for item in given):
        return [given]
    if not given:
        raise refused(name, "give at least one")
    return given


def n_texts(prompts: Sequence[Any]) -> int:
    """The texts of *prompts*, each of which is tokenized alone; token ids together are one."""
    n_items = 0
    for prompt in prompts:
        texts = isinstance(prompt, list) and sum(not isinstance(i, int) for i in prompt)
        n_items += max(int(texts), 1)
    return n_items


async def tokens_of(engine: AsyncEngine, given: object) -> list[int]:
    """A text at the beginning gets what begins prompts."""
    tokens: list[int] = []
    for index, item in enumerate(given if isinstance(given, list) else [given]):
        if isinstance(item, int):
            tokens.append(item)
            continue
        text = item.text if isinstance(item, TextObject) else item
        if not isinstance(text, str):
            raise refused("prompt", "a list with token ids may have texts beside them")
        tokens += await engine.tokenize(text, add_special=index == 0)
    return tokens
