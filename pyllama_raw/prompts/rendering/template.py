"""A compiled chat template: messages to text, with the origin of each character."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pyllama_raw.prompts.rendering.environment import TextEnvironment
from pyllama_raw.prompts.rendering.forms import (
    CALL_FORMS,
    texts_of,
    with_calls,
    with_reasoning,
)
from pyllama_raw.prompts.rendering.roles import quoted_words
from pyllama_raw.prompts.rendering.takes import Takes
from pyllama_raw.prompts.rendering.text import from_message, from_template, origins

# Templates print roles as part of their markers: "<|" + role + "|>".
ROLES = frozenset({
    "assistant", "developer", "function", "ipython", "model", "observation", "system",
    "tool", "user",
})  # fmt: skip


class CompiledTemplate:
    """
    One template.

    Args:
        tokens: names and texts of the tokens that templates may ask for.

    Attributes:
        takes: what it does with parts, tools, calls and developers.

    Raises:
        Exception: of many kinds; Jinja and Python's compiler do not agree on one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._template = TextEnvironment().from_string(source)
        self._knows_developers = "developer" in quoted_words(source)
        self._tokens = {name: from_template(text) for name, text in tokens.items()}
        self.takes = Takes(partial(self._rendered, kwargs={}, asks=True))

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        asks: bool = True,
    ) -> tuple[str, str]:
        """
        The prompt and its origins.

        Args:
            kwargs: further variables of the template.
            asks: for the next assistant message; otherwise the prompt ends with the last.

        Raises:
            Exception: of any kind; templates are programs of strangers.
        """
        taken = [self._as_taken(message) for message in messages]
        return self._rendered(taken, tools, kwargs=kwargs or {}, asks=asks)

    def _rendered(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        *,
        kwargs: Mapping[str, Any],
        asks: bool,
    ) -> tuple[str, str]:
        """Tools that nobody gave are left undefined, because some templates loop over them."""
        variables = {name: _lifted(value) for name, value in kwargs.items()}
        text = self._template.render(
            variables
            | self._tokens
            | ({"tools": _lifted(tools)} if tools else {})
            | {
                "messages": [_lifted_message(message) for message in messages],
                "add_generation_prompt": asks,
                "documents": variables.get("documents"),
            }
        )
        return text, origins(text)

    def _as_taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """*message* in the form that the template takes."""
        match message["role"]:
            case "assistant":
                message = with_reasoning(message)
            case "developer" if not (self._knows_developers and self.takes.developers):
                message = message | {"role": "system"}
        if isinstance(message.get("tool_calls"), list):
            form = self.takes.calls if message["tool_calls"] else CALL_FORMS[0]
            message = with_calls(message, form)
        texts = texts_of(message.get("content"))
        if texts is None or self.takes.parts(message["role"]):
            return message
        return message | {"content": "\n".join(texts)}  # as llama-server joins them


def _lifted_message(message: dict[str, Any]) -> dict[str, Any]:
    lifted: dict[str, Any] = _lifted(message)
    if message["role"] in ROLES:
        lifted["role"] = from_template(message["role"])
    return lifted


def _lifted(value: Any) -> Any:
    """*value* with Text of a message in place of strings, keys included."""
    if isinstance(value, str):
        return from_message(value)
    if isinstance(value, dict):
        return {from_message(key): _lifted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_lifted(item) for item in value]
    return value
