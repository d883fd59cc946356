"""Messages in the form that a template takes, for which clients send them otherwise."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

REASONING = ("reasoning_content", "thinking", "reasoning")  # the first that is there


class CallForm(NamedTuple):
    """The form in which a template wants the calls of tools."""

    as_text: bool  # arguments are JSON in a text, not a mapping
    content: str | None  # of a message that has calls and no text


CALL_FORMS = (
    CallForm(as_text=False, content=""),
    CallForm(as_text=True, content=""),
    CallForm(as_text=False, content=None),
    CallForm(as_text=True, content=None),
)


def with_calls(message: dict[str, Any], form: CallForm) -> dict[str, Any]:
    """*message*, which has calls of tools, in *form*."""
    calls = [_with_arguments(call, form.as_text) for call in message["tool_calls"]]
    content = message.get("content") or form.content
    return message | {"tool_calls": calls, "content": content}


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """*message* with its reasoning under both names that templates read."""
    given = (message.get(name) for name in REASONING)
    reasoning = next((value for value in given if value is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def texts_of(content: Any) -> list[str] | None:
    """The texts of parts of text; None if it is something else."""
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                return None
    return texts


def _with_arguments(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    shape = _as_text if as_text else _as_mapping
    return call | {"function": function | {"arguments": shape(function["arguments"])}}


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _as_mapping(arguments: Any) -> Any:
    """A text that is no JSON stays as it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
