"""
Chat messages on their way to a template: put right, checked and copied.

Rules:
1. Calls of tools and their results in the history are as others wrote them. What has one meaning
   only is put right: ids that are left out, no arguments, a result without text, results in another
   order than their calls. Calls of functions, as OpenAI's API had them before tools (`function_call`
   and the role `function`), become calls of tools, because templates print no others. Arguments that
   are no JSON stay text, because many templates can print it. Where one cannot, the error names the
   place.
2. A template runs in another process, so messages are what JSON can say. The copy is made once,
   so nobody can change what was checked.
3. Templates drop messages of roles that they do not know, or give them to a model that was never
   trained for them. Both would be silent, so only known roles pass.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard, TypeVar

from pyllama_raw.errors import InvalidRequest

T = TypeVar("T")
Message = Mapping[str, Any]

MAX_MESSAGES = 2**13  # of a chat
MAX_CALLS = 1024  # of a message
MAX_CHARACTERS = 2**24  # of the prompt, and of the messages together
MAX_DEPTH = 100  # lists and mappings in each other
MAX_VALUES = 2**18  # texts, numbers, lists and mappings of all messages
MAX_INT_BITS = 4096  # Python refuses to write much larger ones
MEDIA = {"image": "images", "audio": "audio", "video": "videos"}
REASONING = ("reasoning_content", "thinking", "reasoning")  # the first that is there
STANDARD = ("system", "developer", "user", "assistant", "tool")  # roles


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether *value* is a list of any kind, and no text."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether *prompt* is a list of messages."""
    return is_sequence(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def with_history(read: Callable[[Any], T], prompt: Any) -> T:
    """
    Return what *read* makes of *prompt*; the history of a chat is as templates take it.

    Raises:
        InvalidRequest: a call is none; or *read* refuses, and the history may be why.
    """
    # Another prompt has no history. A chat that is too long is refused before it is copied.
    if not is_chat(prompt) or len(prompt) > MAX_MESSAGES:
        return read(prompt)
    history = _History()
    numbered = enumerate(islice(prompt, len(prompt)))
    messages = [history.mended(message, f"messages[{i}]") for i, message in numbered]
    messages = _with_results_in_order(messages)
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
        self._ids: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def mended(self, message: Any, place: str) -> Any:
        """*message*, in a dict of its own if it is changed."""
        if not isinstance(message, Mapping):
            return message  # it is refused where messages are copied
        if message.get("role") in ("tool", "function"):
            return self._result(message, place)
        calls = message.get("tool_calls")
        if not calls and (function := message.get("function_call")) is not None:
            fields = {k: v for k, v in message.items() if k != "function_call"}
            function = _function(function, f"{place}.function_call")
            return {**fields, "tool_calls": [self._with_id({}, function, place)]}
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
        self._ids[name][call_id] = None
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
                waiting = self._ids.get(name, {})
            call_id = next(iter(waiting), None)
        if call_id is not None and call_id in self._open:
            self._ids[self._open.pop(call_id)].pop(call_id, None)
        ids = {} if call_id is None else {"tool_call_id": call_id}
        content = "" if content is None else content
        return {**message, "role": "tool", **ids, "content": content}


def _with_results_in_order(messages: Sequence[Any]) -> list[Any]:
    """
    *messages* in which the results of one turn stand in the order of its calls.

    Agents that run several tools at once send results as they come. Ids say which is which, but many
    templates print none, and the model takes the first result for that of the first call.
    """
    ordered: list[Any] = []
    places: dict[str, int] = {}  # of calls of the last turn, by their ids
    start = 0  # of its results
    for message in (*messages, None):
        is_message = isinstance(message, Mapping)
        if is_message and message.get("role") == "tool":
            ordered.append(message)
            continue
        # Images and sounds are counted as they were sent, so only texts change their places.
        results = ordered[start:]
        ids = [result.get("tool_call_id") for result in results]
        is_plain = all(_is_plain(result.get("content")) for result in results)
        if is_plain and len({*ids} & places.keys()) == len(ids) > 1:
            ordered[start:] = sorted(results, key=lambda r: places[r["tool_call_id"]])
        if message is not None:
            ordered.append(message)
            start = len(ordered)
            calls = message.get("tool_calls") if is_message else None
            places = {call["id"]: i for i, call in enumerate(calls or ())}
    return ordered


def _is_plain(content: object) -> bool:
    """Whether *content* is text, or parts of text."""
    if not is_sequence(content):
        return isinstance(content, str)
    return all(isinstance(p, Mapping) and p.get("type") == "text" for p in content)


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


# -- checked and copied ------------------------------------------------------------------


def plain_messages(messages: Sequence[Message]) -> list[Any]:
    """
    A copy of *messages* in dicts, lists, text and numbers.

    Raises:
        InvalidRequest: not messages, parts that are no text, values that JSON does not
            have, or too much of them.
    """
    if len(messages) > MAX_MESSAGES:
        count = f"{len(messages)} messages"
        raise InvalidRequest("messages", count, f"at most {MAX_MESSAGES} messages")
    copier = _Copier()
    plain = []
    message: Any
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            allowed = 'messages with a "role" and a "content"'
            raise InvalidRequest("prompt", message, allowed)
        # A user says something: a name that is misspelt, as "contents", would be an empty message.
        if message["role"] == "user" and "content" not in message:
            raise InvalidRequest("content", message, 'a message with a "content"')
        content = message.get("content")
        if is_sequence(content):
            for part in content:
                _check_part(part)
        elif content is not None and not isinstance(content, str):
            raise InvalidRequest("content", content, "text, a list of parts, or None")
        plain.append(copier.copy(message, 0))
    return plain


def plain_value(name: str, value: object) -> Any:
    """A copy of the option *name* of a chat. Raises InvalidRequest as plain_messages()."""
    return _Copier(name).copy(value, 0)


def _check_part(part: object) -> None:
    """Parts of any kind but media are the template's business."""
    if not isinstance(part, Mapping):
        return
    names = [name for name in (part.get("type"), *part) if isinstance(name, str)]
    for kind, kinds in MEDIA.items():
        if any(name.removeprefix("input_").startswith(kind) for name in names):
            allowed = (
                f"text: this model takes no {kinds} without a projector (MediaConfig.mmproj), and "
                "none in other words than those of docs/images.md"
            )
            if kind == "video":
                allowed = "text: this model takes no videos, and no other does here"
            raise InvalidRequest("content", f"a part with {kind}", allowed)


@dataclass(slots=True)
class _Copier:
    """A copy that is counted while it is made; errors call it *name*."""

    _name: str = "messages"
    _n_characters: int = 0
    _n_values: int = 0

    def copy(self, value: Any, depth: int) -> Any:
        self._count(value, depth)
        if value is None or isinstance(value, str | float | bool):
            return value
        if isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                size = f"a number of {value.bit_length()} bits"
                raise InvalidRequest(self._name, size, f"at most {MAX_INT_BITS} bits")
            return value
        if isinstance(value, Mapping):
            return {
                self._key(key, depth): self.copy(item, depth + 1)
                for key, item in value.items()
            }
        if is_sequence(value):
            return [self.copy(item, depth + 1) for item in value]
        allowed = "text, numbers, True, False, None, lists and mappings"
        if self._name == "tools" and callable(value):
            allowed = "what pyllama_raw.tools.schema_of() makes of a function"
        kind = f"a value of type {type(value).__name__}"
        raise InvalidRequest(self._name, kind, allowed)

    def _key(self, key: object, depth: int) -> str:
        if not isinstance(key, str):
            kind = f"a mapping's key of type {type(key).__name__}"
            raise InvalidRequest(self._name, kind, "text as keys of mappings")
        self._count(key, depth)
        return key

    def _count(self, value: object, depth: int) -> None:
        self._n_values += 1
        if isinstance(value, str):
            self._n_characters += len(value)
        if depth > MAX_DEPTH:
            excess = "lists or mappings in each other"
            raise InvalidRequest(self._name, excess, f"at most {MAX_DEPTH} levels")
        if self._n_values > MAX_VALUES or self._n_characters > MAX_CHARACTERS:
            excess = f"{self._n_values} values, {self._n_characters} characters"
            allowed = f"at most {MAX_VALUES} values and {MAX_CHARACTERS} characters"
            raise InvalidRequest(self._name, excess, allowed)


# -- roles -------------------------------------------------------------------------------


def check_roles(messages: list[Any], template: str) -> None:
    """Raise InvalidRequest if a role is not standard, and *template* does not name it."""
    roles = {i: m["role"] for i, m in enumerate(messages) if m["role"] not in STANDARD}
    words = quoted_words(template) if roles else ()
    for i, role in roles.items():
        if role not in words:
            allowed = f"{', '.join(STANDARD)}, or a role that the chat template names"
            raise InvalidRequest(f"messages[{i}].role", role, allowed)


def quoted_words(template: str) -> set[str]:
    """Words that the source *template* has in quotes; a marker such as "</s>" is none."""
    return {word for _, word in re.findall(r"(['\"])(\w+)\1", template)}
