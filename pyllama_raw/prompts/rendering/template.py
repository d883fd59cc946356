"""
A compiled chat template: messages to text, with the origin of each character.

What a template takes is found by rendering: unusual words are in the prompt or not. Its source
does not tell, because a template may name what it does not print.

Clients send what their model's template takes: system messages between turns, several messages
of one role, results without their call. Templates of other models raise for these, so chats are
brought into a form that the template takes. Rules of CHANGES:
1. No text is made up and none is lost: messages move, join, or change their role. What is added is
   an empty message of the user, where a template wants one to come first, the name of an argument,
   where a call has none, and an empty reasoning, where a template wants one of each answer.
2. Each change is tried on top of those before it, the smallest first. A template that takes a
   chat as it is gets it as it is.
3. A change that has nothing to do gives back None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

from jinja2.meta import find_undeclared_variables

from pyllama_raw.prompts.messages import REASONING, STANDARD, quoted_words
from pyllama_raw.prompts.rendering.environment import (
    TextEnvironment,
    from_message,
    from_template,
    origins,
)


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


def object_arguments(messages: list[Message]) -> list[Message] | None:
    """Arguments that are no object, as those of a call that was cut, are the input of one."""

    def mended(call: Any) -> Any:
        match call:
            case {"function": {"arguments": arguments, **function}}:
                if arguments is None or isinstance(_as_mapping(arguments), dict):
                    return call
                function["arguments"] = {"input": arguments}
                return call | {"function": function}
        return call

    changed = [
        message | {"tool_calls": [*map(mended, message["tool_calls"])]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
    return None if changed == messages else changed


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


def with_empty_reasoning(messages: list[Message]) -> list[Message] | None:
    """Answers whose reasoning nobody sent have an empty one."""
    changed = [
        message
        if message["role"] != "assistant" or any(name in message for name in REASONING)
        else message | {"reasoning_content": ""}
        for message in messages
    ]
    return None if changed == messages else changed


CHANGES: dict[str, Change] = {  # in the order in which they are tried
    "messages without content have an empty one": with_content,
    "later system messages are text of the user": systems_in_front,
    "ids of calls are others": plain_ids,
    "arguments that are no object are its input": object_arguments,
    "results without a call are text of the user": results_as_users,
    "empty messages of the assistant are left out": without_empty,
    "messages of one role are joined": joined_turns,
    "system messages are text of the user": systems_as_users,
    "joined once more": joined_turns,
    "an empty message of the user comes first": user_in_front,
    "answers without reasoning have an empty one": with_empty_reasoning,
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
        # A template that takes the chat as it is gets it as it is. Otherwise changes are tried,
        # each on top of those before it.
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
        n_systems = sum(role in SYSTEMS for role in roles)
        changes: list[Change] = []
        # Results without their call, later system messages, and system messages at all.
        if "tool" in roles and not self.takes.lone_results:
            changes.append(results_as_users)
        n_front = sum(role in SYSTEMS for role in roles[:1])
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
        # Arguments are text or a mapping, as the template prints them right.
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


# -- questions to a template -------------------------------------------------------------

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
        quotes = ("'text'", '"text"')  # it prints the list itself
        parts = self._printed(self._around({"role": role, "content": PARTS}))
        if _has(parts, [first, last], quotes):
            return True
        text = self._printed(self._around({"role": role, "content": first}))
        return _has(parts, [first], quotes) and not _has(text, [first])

    @cached_property
    def developers(self) -> bool:
        """Whether it prints what a developer says."""
        message = {"role": "developer", "content": "sentinelwish"}
        return _has(self._printed([message, USER]), ["sentinelwish"])

    @cached_property
    def system(self) -> bool:
        """Whether it prints a system message in front; also if it takes no chat without one."""
        message = {"role": "system", "content": "sentinelwish"}
        if _has(self._printed([message, USER]), ["sentinelwish"]):
            return True
        return self._printed([USER]) is None

    @cached_property
    def systems(self) -> bool:
        """Whether it prints system messages wherever they are."""
        words = [f"sentinelwish{number}" for number in ("one", "two", "three")]
        first, second, third = ({"role": "system", "content": word} for word in words)
        answer = {"role": "assistant", "content": "a"}
        chat = [first, second, USER, answer, third, USER]
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
        has_tools = any(_has(text, ["sentineltool"]) for text in printed)
        return has_tools or all(text is None for text in printed)

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


def _has(text: str | None, words: Iterable[str], unwanted: Iterable[str] = ()) -> bool:
    if text is None:
        return False
    return all(word in text for word in words) and not any(
        word in text for word in unwanted
    )
