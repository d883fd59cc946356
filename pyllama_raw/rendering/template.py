"""A compiled chat template: messages to text, with the origin of each character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyllama_raw.rendering.environment import TextEnvironment
from pyllama_raw.rendering.text import from_message, from_template, origins

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

    Raises:
        Exception: of many kinds; Jinja and Python's compiler do not agree on one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._template = TextEnvironment().from_string(source)
        self._tokens = {name: from_template(text) for name, text in tokens.items()}

    def render(self, messages: list[Any]) -> tuple[str, str]:
        """
        The prompt that asks for the next assistant message, and its origins.

        Raises:
            Exception: of any kind; templates are programs of strangers.
        """
        text = self._template.render(
            messages=[_lifted_message(message) for message in messages],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **self._tokens,
        )
        return text, origins(text)


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
