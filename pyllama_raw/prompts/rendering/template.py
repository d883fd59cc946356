"""A compiled chat template: messages to text, with the origin of each character."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pyllama_raw.prompts.rendering.environment import TextEnvironment
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

    Raises:
        Exception: of many kinds; Jinja and Python's compiler do not agree on one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._template = TextEnvironment().from_string(source)
        self._tokens = {name: from_template(text) for name, text in tokens.items()}

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
        variables = {name: _lifted(value) for name, value in (kwargs or {}).items()}
        text = self._template.render(
            variables
            | self._tokens
            | {
                "messages": [self._lifted_message(message) for message in messages],
                "add_generation_prompt": asks,
                "tools": _lifted(tools),
                "documents": variables.get("documents"),
            }
        )
        return text, origins(text)

    def _lifted_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """As templates expect it, for which clients of OpenAI send it otherwise."""
        lifted: dict[str, Any] = _lifted(message)
        if message["role"] in ROLES:
            lifted["role"] = from_template(message["role"])
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            lifted["tool_calls"] = [_lifted(_with_mapping(call)) for call in calls]
            if message.get("content") is None:
                lifted["content"] = from_message("")
        texts = _texts(message.get("content"))
        if texts is not None and not self._takes_parts:
            lifted["content"] = from_message("\n".join(texts))
        return lifted

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether it prints the text of parts, and not of a plain text."""
        return not self._prints("plain") and self._prints(
            [{"type": "text", "text": "plain"}]
        )

    def _prints(self, content: Any) -> bool:
        messages = [{"role": from_template("user"), "content": _lifted(content)}]
        try:
            return "plain" in self._template.render(messages=messages, **self._tokens)
        except Exception:  # noqa: BLE001 - templates are programs of strangers
            return False


def _texts(content: Any) -> list[str] | None:
    """The texts of parts of text; None if it is something else."""
    if not isinstance(content, list):
        return None
    texts = [
        part.get("text")
        if isinstance(part, dict) and part.get("type") == "text"
        else None
        for part in content
    ]
    found = [text for text in texts if isinstance(text, str)]
    return found if len(found) == len(content) else None


def _with_mapping(call: Any) -> Any:
    """A call whose arguments, JSON in a text, are the mapping that templates print."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return call | {"function": function | {"arguments": arguments}}


def _lifted(value: Any) -> Any:
    """*value* with Text of a message in place of strings, keys included."""
    if isinstance(value, str):
        return from_message(value)
    if isinstance(value, dict):
        return {from_message(key): _lifted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_lifted(item) for item in value]
    return value
