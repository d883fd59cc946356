"""
Chats in a form that a template takes, for which clients send them otherwise.

Clients send what their model's template takes: system messages between turns, several messages
of one role, results without their call. Templates of other models raise for these.

Rules of CHANGES:
1. No text is made up and none is lost: messages move, join, or change their role. The one thing
   that is added is an empty message of the user, where a template wants one to come first.
2. Each change is tried on top of those before it, the smallest first. A template that takes a
   chat as it is gets it as it is.
3. A change that has nothing to do gives back None.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
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
    thoughts = (message.get(name) for name in REASONING)
    reasoning = next((value for value in thoughts if value is not None), None)
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


# -- a chat that a template refuses ------------------------------------------------------

Message = dict[str, Any]
Change = Callable[[list[Message]], list[Message] | None]

SYSTEMS = ("system", "developer")
BLANK = "\n\n"  # between texts that were messages


def with_content(messages: list[Message]) -> list[Message] | None:
    """Messages without content have an empty one."""
    if all("content" in message for message in messages):
        return None
    return [{"content": "", **message} for message in messages]


def systems_in_front(messages: list[Message]) -> list[Message] | None:
    """System messages in front are one; later ones are text of the user beside them."""
    n_front = _n_systems(messages)
    later = [m for m in messages[n_front:] if m["role"] in SYSTEMS]
    if n_front <= 1 and not later:
        return None
    front = [_joined(messages[:n_front])] if n_front else []
    return front + _with_users(messages[n_front:])


def systems_as_users(messages: list[Message]) -> list[Message] | None:
    """All system messages are text of the user beside them."""
    if not any(m["role"] in SYSTEMS for m in messages):
        return None
    return _with_users(messages)


def plain_ids(messages: list[Message]) -> list[Message] | None:
    """Ids of calls have nine letters and digits, as some templates want them."""
    ids: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                ids.setdefault(call["id"], f"call{len(ids):05}")
    if not ids or all(len(id_) == 9 and id_.isalnum() for id_ in ids):
        return None

    def renamed(message: Message) -> Message:
        answered = message.get("tool_call_id")
        if answered in ids:
            return message | {"tool_call_id": ids[answered]}
        if not message.get("tool_calls"):
            return message
        calls = [
            call | {"id": ids.get(str(call.get("id")), call.get("id"))}
            if isinstance(call, dict)
            else call
            for call in message["tool_calls"]
        ]
        return message | {"tool_calls": calls}

    return [renamed(message) for message in messages]


def results_as_users(messages: list[Message]) -> list[Message] | None:
    """Results of calls that are not there are text of the user."""
    calls: set[Any] = set()
    changed = []
    for message in messages:
        calls |= {
            call.get("id")
            for call in message.get("tool_calls") or ()
            if isinstance(call, dict)
        }
        is_lost = message["role"] == "tool" and message.get("tool_call_id") not in calls
        changed.append(_as_user(message) if is_lost else message)
    return None if changed == messages else changed


def without_empty(messages: list[Message]) -> list[Message] | None:
    """Messages of the assistant that say, think and call nothing are left out."""
    fields = ("content", "tool_calls", *REASONING)
    full = [m for m in messages if m["role"] != "assistant" or any(map(m.get, fields))]
    return None if len(full) in (0, len(messages)) else full


def joined_turns(messages: list[Message]) -> list[Message] | None:
    """Neighbours of one role are one message; calls and results stay as they are."""

    def kind(message: Message) -> object:
        can_join = message["role"] in ("user", "assistant", *SYSTEMS)
        if not can_join or message.get("tool_calls"):
            return object()  # is equal to no other
        return message["role"]

    runs = [[*run] for _, run in groupby(messages, kind)]
    if len(runs) == len(messages):
        return None
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def user_in_front(messages: list[Message]) -> list[Message] | None:
    """A chat that no user has begun is begun by an empty message."""
    at = _n_systems(messages)
    if messages[at:] and messages[at]["role"] == "user":
        return None
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


CHANGES: dict[str, Change] = {  # in the order in which they are tried
    "messages without content have an empty one": with_content,
    "later system messages are text of the user": systems_in_front,
    "ids of calls are others": plain_ids,
    "results without a call are text of the user": results_as_users,
    "empty messages of the assistant are left out": without_empty,
    "messages of one role are joined": joined_turns,
    "system messages are text of the user": systems_as_users,
    "joined once more": joined_turns,
    "an empty message of the user comes first": user_in_front,
}


def _n_systems(messages: list[Message]) -> int:
    """The number of system messages in front."""
    places = (i for i, m in enumerate(messages) if m["role"] not in SYSTEMS)
    return next(places, len(messages))


def _with_users(messages: list[Message]) -> list[Message]:
    """
    *messages*, with those of the system as text of a message of the user.

    That is the next message, else the one before, else the nearest later or earlier one of the
    user. A chat without a user has one then.
    """
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    before: dict[int, list[Message]] = {}  # what goes in front of a message of the user
    behind: dict[int, list[Message]] = {}
    for i, message in enumerate(messages):
        if message["role"] not in SYSTEMS or not users:
            continue
        after = next((at for at in users if at > i), None)
        prior = next((at for at in reversed(users) if at < i), None)
        # Only other system messages lie between.
        is_next = after is not None and _all_systems(messages[i:after])
        is_prior = prior is not None and _all_systems(messages[prior + 1 : i])
        if after is not None and (is_next or not is_prior):
            before.setdefault(after, []).append(message)
        else:
            assert prior is not None
            behind.setdefault(prior, []).append(message)
    changed = []
    for i, message in enumerate(messages):
        if message["role"] in SYSTEMS:
            if not users:
                changed.append(_as_user(message))
            continue
        parts = [*before.get(i, ()), message, *behind.get(i, ())]
        content = {"content": _joined(parts)["content"]} if len(parts) > 1 else {}
        changed.append(message | content)
    return changed


def _all_systems(messages: list[Message]) -> bool:
    return all(message["role"] in SYSTEMS for message in messages)


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": message.get("content") or ""}


def _joined(messages: list[Message]) -> Message:
    """One message with the fields of all, the first one's before others', and all content."""
    contents = [m.get("content") or "" for m in messages]
    content: Any
    if all(isinstance(text, str) for text in contents):
        content = BLANK.join(filter(None, contents))
    else:
        content = []
        for text in contents:
            content += (
                [{"type": "text", "text": text}] if isinstance(text, str) else text
            )
    fields: Message = {}
    for message in reversed(messages):
        fields |= message
    for name in REASONING:
        thoughts = [m[name] for m in messages if isinstance(m.get(name), str)]
        if len(thoughts) > 1:
            fields[name] = BLANK.join(thoughts)
    return fields | {"content": content}
