"""
Inputs that a template takes, found by rendering: unusual words are in the prompt or not.

Its source does not tell, because a template may name what it does not print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from typing import Any

from pyllama_raw.prompts.rendering.forms import CALL_FORMS, CallForm, with_calls

Render = Callable[[list[Any], list[Any]], tuple[str, str]]

USER = {"role": "user", "content": "a"}
SYSTEM = {"role": "system", "content": "a"}
PARTS = [{"type": "text", "text": "firstpart"}, {"type": "text", "text": "lastpart"}]
_FUNCTION = {
    "name": "sentineltool",
    "description": "sentineltool",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "a"}},
        "required": ["key"],
    },
}
TOOL = {"type": "function", "function": _FUNCTION}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "calledtool", "arguments": {"key": "givenvalue"}},
        }
    ],
}
ANSWER = {"role": "tool", "tool_call_id": "abcdefghi", "name": "calledtool"}


class Takes:
    """
    Asks one template, each question once.

    Args:
        render: the prompt of messages and tools, and its origins.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self.parts = cache(self._takes_parts)

    def content(self, roles: Iterable[str]) -> bool:
        """
        Whether what a user says changes the prompt; also if it takes no chat of those tried.

        Args:
            roles: others than the standard ones, which may be its users.
        """

        def chats(word: str) -> Iterator[tuple[list[Any], list[Any]]]:
            user = {"role": "user", "content": word}
            yield [user], []
            yield [{"role": "user", "content": [{"type": "text", "text": word}]}], []
            yield [SYSTEM, user], []
            yield [SYSTEM, user], [TOOL]
            # Roles of its own together: nothing says which of its words are any.
            yield [{"role": role, "content": word} for role in roles], []

        # Two texts rather than one that is looked for: a template may spell a text otherwise.
        is_taken = False
        for chat, other in zip(chats("firstwish"), chats("another"), strict=True):
            printed = self._printed(chat[0], *chat[1])
            if printed != self._printed(other[0], *other[1]):
                return True
            is_taken |= printed is not None
        return not is_taken

    def _takes_parts(self, role: str) -> bool:
        """Whether to give it parts: it prints them all, or nothing of a text."""
        first, last = (part["text"] for part in PARTS)
        shown = ("'text'", '"text"')  # it prints the list itself
        parts = self._printed(self._around({"role": role, "content": PARTS}))
        if _has(parts, [first, last], shown):
            return True
        text = self._printed(self._around({"role": role, "content": first}))
        return _has(parts, [first], shown) and not _has(text, [first])

    @cached_property
    def developers(self) -> bool:
        """Whether it prints what a developer says."""
        said = {"role": "developer", "content": "sentinelwish"}
        return _has(self._printed([said, USER]), ["sentinelwish"])

    @cached_property
    def system(self) -> bool:
        """Whether it prints a system message in front; also if it takes no chat without one."""
        said = {"role": "system", "content": "sentinelwish"}
        if _has(self._printed([said, USER]), ["sentinelwish"]):
            return True
        return self._printed([USER]) is None

    @cached_property
    def systems(self) -> bool:
        """Whether it prints system messages wherever they are."""
        words = [f"sentinelwish{number}" for number in ("one", "two", "three")]
        first, second, third = ({"role": "system", "content": word} for word in words)
        said = {"role": "assistant", "content": "a"}
        chat = [first, second, USER, said, third, USER]
        return _has(self._printed(chat), words)

    @cached_property
    def lone_results(self) -> bool:
        """Whether it prints the result of a call that is not there, if it prints results."""
        result = ANSWER | {"content": "sentinelresult"}
        called = self._printed([USER, with_calls(CALL, self.calls), result])
        if not _has(called, ["sentinelresult"]):
            return True
        return _has(self._printed([USER, result, USER]), ["sentinelresult"])

    @cached_property
    def tools(self) -> bool:
        """Whether it prints tools; also if it takes no chat of those tried."""
        chats = ([USER], [SYSTEM, USER])
        printed = [
            self._printed(chat, tool) for chat in chats for tool in (TOOL, _FUNCTION)
        ]
        found = any(_has(text, ["sentineltool"]) for text in printed)
        return found or all(text is None for text in printed)

    @cached_property
    def calls(self) -> CallForm:
        """The form in which it prints calls; the first one if it prints none."""
        for form in CALL_FORMS:
            chat = [USER, with_calls(CALL, form), ANSWER | {"content": "a"}]
            printed = self._printed(chat, TOOL)
            if _has(printed, ["calledtool", "givenvalue"], ["{'"]):
                return form
        return CALL_FORMS[0]

    def _around(self, message: dict[str, Any]) -> list[Any]:
        """A chat in which templates take *message*."""
        match message["role"]:
            case "user":
                return [message]
            case "assistant":
                return [USER, message, USER]
            case "tool":
                called = {"role": "tool", "tool_call_id": "abcdefghi"}
                return [USER, with_calls(CALL, self.calls), called | message]
        return [message, USER]

    def _printed(self, messages: list[Any], *tools: Any) -> str | None:
        """Letters of a prompt that the template did not write; None: it refuses."""
        try:
            text, origins = self._render(messages, list(tools))
        except Exception:  # noqa: BLE001 - templates are programs of strangers
            return None
        pairs = zip(text, origins, strict=True)
        return "".join(letter for letter, origin in pairs if origin != "t")


def _has(text: str | None, wanted: Iterable[str], unwanted: Iterable[str] = ()) -> bool:
    if text is None:
        return False
    return all(word in text for word in wanted) and not any(
        word in text for word in unwanted
    )
