"""A compiled chat template: messages to text, with the origin of each character."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from jinja2.meta import find_undeclared_variables

from pyllama_raw.prompts.rendering.environment import TextEnvironment
from pyllama_raw.prompts.rendering.forms import (
    CALL_FORMS,
    texts_of,
    with_calls,
    with_reasoning,
)
from pyllama_raw.prompts.rendering.mending import (
    CHANGES,
    SYSTEM,
    Change,
    results_as_users,
    systems_as_users,
    systems_in_front,
)
from pyllama_raw.prompts.rendering.roles import STANDARD, quoted_words
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
        takes: what it does with parts, tools, calls, systems and developers.
        reads_messages: whether its prompts say anything of a chat; rendered for that once.
        mended: names of the changes without which it would not have taken the last chat.

    Raises:
        Exception: of many kinds; Jinja and Python's compiler do not agree on one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = TextEnvironment()
        variables = find_undeclared_variables(environment.parse(source))
        self._names_messages = "messages" in variables
        self._template = environment.from_string(source)
        self._words = quoted_words(source)
        self._knows_developers = "developer" in self._words
        self._tokens = {name: from_template(text) for name, text in tokens.items()}
        self.takes = Takes(partial(self._rendered, kwargs={}, asks=True))
        self.mended: list[str] = []

    @cached_property
    def reads_messages(self) -> bool:
        return self._names_messages and self.takes.content(self._words - {*STANDARD})

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
        self.mended = []
        chat = self._as_printed([self._as_taken(message) for message in messages])
        render = partial(self._rendered, tools=tools, kwargs=kwargs or {}, asks=asks)
        try:
            return render(chat)
        except MemoryError:
            raise
        except Exception:
            for name, change in CHANGES.items():
                changed = change(chat)
                if changed is None:
                    continue
                chat = changed
                self.mended.append(name)
                with suppress(Exception):
                    return render(chat)
            raise

    def _as_printed(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """*chat* changed where the template would raise no error and print nothing."""
        roles = [message["role"] for message in chat]
        n_systems = sum(role in SYSTEM for role in roles)
        changes: list[Change] = []
        if "tool" in roles and not self.takes.lone_results:
            changes.append(results_as_users)
        n_front = sum(role in SYSTEM for role in roles[:1])
        if n_systems > n_front and not self.takes.systems:
            changes.append(systems_in_front)
        if n_systems and not self.takes.system:
            changes.append(systems_as_users)
        for name, change in CHANGES.items():
            if change in changes and (changed := change(chat)) is not None:
                self.mended.append(name)
                chat = changed
        return chat

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
        # Templates print None as a word.
        is_none = "content" in message and message["content"] is None
        if is_none and not message.get("tool_calls"):
            message = message | {"content": ""}
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
