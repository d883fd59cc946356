"""
Tools of a body, as options of the engine.

Chats and responses differ in one thing: the fields of a function are in an object of their own
in a chat, and beside its type in a response. Both are read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyllama_raw.serve.failures import refused

WORDS = ("auto", "none", "required")


def tool_options(
    tools: Sequence[Mapping[str, Any]] | None, choice: object, is_parallel: bool | None
) -> dict[str, Any]:
    """
    Options of a chat that may call *tools*.

    Args:
        choice: a word, a function that must be called, or those that may be; the model is told
            of no others.

    Raises:
        Failure: a tool is no function, or *choice* is none.
    """
    tools = tools or ()
    for i, tool in enumerate(tools):
        if name_of(tool) is None:
            place = f"tools[{i}]"
            raise refused(place, 'give {"type": "function", "function": {"name": ...}}')
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = _inner(choice)
        names = {name_of(each) for each in _listed(allowed.get("tools"))}
        tools = [tool for tool in tools if name_of(tool) in names]
        choice = allowed.get("mode", "auto")
        if not tools:
            raise refused("tool_choice", "none of tools is allowed")
    word = _chosen(choice)
    if not tools and word not in ("auto", "none"):
        raise refused("tool_choice", f"{word!r} needs tools, and there are none")
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    if word != "auto":
        options["tool_choice"] = word
    if tools and is_parallel is False and word != "none":
        options["parallel_tool_calls"] = False
    return options


def function_tool(
    tool: Mapping[str, Any], parameters: object, **fields: Any
) -> dict[str, Any]:
    """A *tool* of a dialect as chat templates know it."""
    takes = parameters or {"type": "object"}
    function = {"name": tool.get("name"), "parameters": takes, **fields}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def tool_call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    """A call as messages of chats have it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def as_function(call: object) -> object:
    """The *call* of a custom tool as that of a function; any other stays as it is."""
    if not isinstance(call, dict) or call.get("type") != "custom":
        return call
    custom = call.get("custom")
    if not isinstance(custom, dict):
        return call
    given = {"input": custom.get("input")}
    return tool_call(call.get("id"), custom.get("name"), given)


def name_of(tool: object) -> str | None:
    """The name of a function; None if *tool* is none."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        return None
    name = _inner(tool).get("name")
    return name if isinstance(name, str) and name else None


def _chosen(choice: object) -> str:
    if choice is None or choice in WORDS:
        return str(choice or "auto")
    name = name_of(choice)
    if name is None:
        words = ", ".join(WORDS)
        raise refused("tool_choice", f"give {words}, a function, or allowed_tools")
    if name in WORDS:  # the engine has one word for both
        raise refused("tool_choice", f"a function named {name} cannot be chosen")
    return name


def _inner(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that go with the type of *value*."""
    inner = value.get(str(value.get("type", "function")), value)
    return inner if isinstance(inner, Mapping) else {}


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()
