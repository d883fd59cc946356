"""
Calls of tools and their results in the history of a chat, as others wrote them.

What has one meaning only is put right: ids that are left out, no arguments, a result without
text. Arguments that are no JSON stay text, because many templates can print it. Where one
cannot, the error names the place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.prompts.messages import Message, is_sequence
from pyllama_raw.prompts.rendering.limits import MAX_MESSAGES

T = TypeVar("T")

MAX_CALLS = 1024  # of a message


def with_history(read: Callable[[Any], T], prompt: Any) -> T:
    """
    Return what *read* makes of *prompt*; the history of a chat is as templates take it.

    Raises:
        InvalidRequest: a call is none; or *read* refuses, and the history may be why.
    """
    if not is_sequence(prompt) or not 0 < len(prompt) <= MAX_MESSAGES:
        return read(prompt)
    if not isinstance(prompt[0], Mapping):
        return read(prompt)
    messages = _History().mended(prompt)
    try:
        return read(messages)
    except InvalidRequest as error:
        place, value, allowed = next(_suspects(messages), ("", None, ""))
        if error.name != "messages" or not place:
            raise
        allowed = f"{allowed}, because the template takes no other: {error.allowed}"
        raise InvalidRequest(place, value, allowed) from error


class _History:
    """Puts messages right, one after the other."""

    def __init__(self) -> None:
        self._n_calls = 0
        self._open: list[str] = []  # ids of calls without a result

    def mended(self, messages: Sequence[Message]) -> list[Any]:
        """*messages*, each in a dict of its own if it is changed."""
        numbered = enumerate(islice(messages, len(messages)))
        return [self._message(message, f"messages[{i}]") for i, message in numbered]

    def _message(self, message: Any, place: str) -> Any:
        if not isinstance(message, Mapping):
            return message  # it is refused where messages are copied
        if message.get("role") == "tool":
            return self._result(message, place)
        calls = message.get("tool_calls")
        if calls is None:
            return message
        place = f"{place}.tool_calls"
        if not is_sequence(calls):
            raise InvalidRequest(place, calls, "a list of calls, or None")
        if len(calls) > MAX_CALLS:
            raise InvalidRequest(place, f"{len(calls)} calls", f"at most {MAX_CALLS}")
        numbered = enumerate(islice(calls, len(calls)))
        mended = [self._call(call, f"{place}[{i}]") for i, call in numbered]
        return {**message, "tool_calls": mended}

    def _call(self, call: Any, place: str) -> dict[str, Any]:
        if not isinstance(call, Mapping):
            raise InvalidRequest(place, call, "a call: its id, type and function")
        if "function" not in call and "name" in call:  # without what is around it
            call = {"function": call}
        function = call.get("function")
        if not isinstance(function, Mapping):
            allowed = "a name and arguments"
            raise InvalidRequest(f"{place}.function", function, allowed)
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"{place}.function.name", name, "the name of a tool")
        if arguments is None or arguments == "":
            arguments = {}
        elif not isinstance(arguments, str | Mapping):
            allowed = "a JSON object, or its text"
            raise InvalidRequest(f"{place}.function.arguments", arguments, allowed)
        return {
            "type": "function",
            **call,
            "id": self._id(call.get("id"), place),
            "function": {**function, "arguments": arguments},
        }

    def _id(self, given: object, place: str) -> str:
        """The id of the next call, which is open now."""
        self._n_calls += 1
        if not (given is None or isinstance(given, str)):
            raise InvalidRequest(f"{place}.id", given, "text")
        # Some templates take ids of nine letters and digits only.
        found = given or f"call{self._n_calls:05}"
        self._open.append(found)
        return found

    def _result(self, message: Mapping[str, Any], place: str) -> dict[str, Any]:
        """A result without an id is that of the first call that has no result."""
        found, content = message.get("tool_call_id"), message.get("content")
        if not (found is None or isinstance(found, str)):
            raise InvalidRequest(f"{place}.tool_call_id", found, "text")
        if found is None and self._open:
            found = self._open[0]
        if found in self._open:
            self._open.remove(found)
        named = {} if found is None else {"tool_call_id": found}
        return {**message, **named, "content": "" if content is None else content}


def _suspects(messages: Sequence[Any]) -> Iterator[tuple[str, object, str]]:
    """Places of *messages* that a template may refuse, what they have, and what is right."""
    ids: set[str] = set()
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return
        if message.get("role") == "tool":
            answered = message.get("tool_call_id")
            if answered not in ids:
                place = f"messages[{i}].tool_call_id"
                yield place, answered, "the id of a call before it"
            continue
        for j, call in enumerate(message.get("tool_calls") or ()):
            ids.add(call["id"])
            arguments = call["function"]["arguments"]
            if not _is_object(arguments):
                place = f"messages[{i}].tool_calls[{j}].function.arguments"
                yield place, arguments, "a JSON object"


def _is_object(arguments: str | Mapping[str, Any]) -> bool:
    try:
        return isinstance(
            json.loads(arguments) if isinstance(arguments, str) else arguments, Mapping
        )
    except (ValueError, RecursionError):
        return False
