"""Messages with calls of tools, whole and in streams, as one form that can be compared."""

from typing import Any


def seen(message: Any) -> dict[str, Any]:
    """Fields of a message, without the ids of calls, which are drawn."""
    told = message.model_dump(exclude_none=True)
    for call in told.get("tool_calls", ()):
        assert call.pop("id")
    if not told.get("content"):  # a stream says nothing
        told.pop("content", None)
    return told


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message of a stream, each call of which begins once."""
    told: dict[str, Any] = {}
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        for name, text in delta.model_dump(exclude_none=True).items():
            if name != "tool_calls":
                told[name] = told.get(name, "") + text
                continue
            [call] = text
            calls, index = told.setdefault(name, []), call.pop("index")
            if index == len(calls):
                assert call.pop("id")
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                calls.append(call)
            else:
                assert (list(call), list(call["function"])) == (
                    ["function"],
                    ["arguments"],
                )
                arguments = call["function"]["arguments"]
                calls[index]["function"]["arguments"] += arguments
    return told
