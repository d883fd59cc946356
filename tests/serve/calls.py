"""Messages with calls of tools, whole and in streams, as one form that can be compared."""

from typing import Any


def seen(message: Any) -> dict[str, Any]:
    """Fields of a message, without the ids of calls, which are drawn."""
    fields = message.model_dump(exclude_none=True)
    for call in fields.get("tool_calls", ()):
        assert call.pop("id")
    if not fields.get("content"):  # a stream says nothing
        fields.pop("content", None)
    return fields


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message of a stream, each call of which begins once."""
    fields: dict[str, Any] = {}
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        for name, text in delta.model_dump(exclude_none=True).items():
            if name != "tool_calls":
                fields[name] = fields.get(name, "") + text
                continue
            [call] = text
            calls, index = fields.setdefault(name, []), call.pop("index")
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
    return fields
