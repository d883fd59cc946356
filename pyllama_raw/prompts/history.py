"""
Calls of tools and their results in the history of a chat, as others wrote them.

What has one meaning only is put right: ids that are left out, no arguments, a result without
text. Calls of functions, as OpenAI's API had them before tools (`function_call` and the role
`function`), become calls of tools, because templates print no others. Arguments that are no
JSON stay text, because many templates can print it. Where one cannot, the error names the place.
"""

from __future__ import annotations

import json
from collections import defaultdict
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
        # Calls without a result, in order: their names by id, and their ids by name. Both are
        # indices, because a history may have many of them.
        self._open: dict[str, str] = {}
        self._named: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def mended(self, messages: Sequence[Message]) -> list[Any]:
        """*messages*, each in a dict of its own if it is changed."""
        numbered = enumerate(islice(messages, len(messages)))
        return [self._message(message, f"messages[{i}]") for i, message in numbered]

    def _message(self, message: Any, place: str) -> Any:
        if not isinstance(message, Mapping):
            return message  # it is refused where messages are copied
        if message.get("role") in ("tool", "function"):
            return self._result(message, place)
        calls = message.get("tool_calls")
        if not calls and (function := message.get("function_call")) is not None:
            others = {k: v for k, v in message.items() if k != "function_call"}
            function = _function(function, f"{place}.function_call")
            return {**others, "tool_calls": [self._with_id({}, function, place)]}
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
        function = _function(call.get("function"), f"{place}.function")
        return self._with_id(call, function, place)

    def _with_id(
        self, call: Mapping[str, Any], function: dict[str, Any], place: str
    ) -> dict[str, Any]:
        """A call of *function*, which is open now; *call* has more fields, and perhaps an id."""
        self._n_calls += 1
        call_id = call.get("id")
        if not (call_id is None or isinstance(call_id, str)):
            raise InvalidRequest(f"{place}.id", call_id, "text")
        # Some templates take ids of nine letters and digits only.
        call_id = call_id or f"call{self._n_calls:05}"
        self._open[call_id] = name = function["name"]
        self._named[name][call_id] = None
        return {"type": "function", **call, "id": call_id, "function": function}

    def _result(self, message: Mapping[str, Any], place: str) -> dict[str, Any]:
        """A result without an id is that of the first call that has no result."""
        call_id, content = message.get("tool_call_id"), message.get("content")
        if not (call_id is None or isinstance(call_id, str)):
            raise InvalidRequest(f"{place}.tool_call_id", call_id, "text")
        if call_id is None:
            waiting: Mapping[str, object] = self._open
            # One of a function has a name in place of an id.
            if message["role"] == "function":
                name = message.get("name")
                if not isinstance(name, str) or not name:
                    allowed = (
                        "the name of the function, or a message of the role 'tool'"
                    )
                    raise InvalidRequest(f"{place}.name", name, allowed)
                waiting = self._named.get(name, {})
            call_id = next(iter(waiting), None)
        if call_id is not None and call_id in self._open:
            self._named[self._open.pop(call_id)].pop(call_id, None)
        named = {} if call_id is None else {"tool_call_id": call_id}
        content = "" if content is None else content
        return {**message, "role": "tool", **named, "content": content}


def _function(function: object, place: str) -> dict[str, Any]:
    """The name and arguments of a call. Raises InvalidRequest."""
    if not isinstance(function, Mapping):
        raise InvalidRequest(place, function, "a name and arguments")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{place}.name", name, "the name of a tool")
    if arguments is None or arguments == "":
        arguments = {}
    elif not isinstance(arguments, str | Mapping):
        allowed = "a JSON object, or its text"
        raise InvalidRequest(f"{place}.arguments", arguments, allowed)
    return {**function, "arguments": arguments}


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
