"""
The chat cases of llama.cpp's test-chat.cpp: a template, a reply and what is in it.

The source is read at run time; nothing of it is kept here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from scripts.cpp_values import Block, Expression, Statement, Token, Unread, tree_of

_UNLIKE_DATA = (Unread, LookupError, TypeError)
MAIN = "test_template_output_peg_parsers"


@dataclass
class Message:
    """Made of the fields of a `common_chat_msg`."""

    role: str = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, arguments as JSON, and an id or ""."""
    tool_name: str = ""
    tool_call_id: str = ""


@dataclass
class Case:
    """One reply, with the options of llama.cpp where they are not given."""

    line: int
    template: str
    text: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    expected: Message = field(default_factory=Message)
    takes_reasoning: bool = False
    enable_thinking: bool = True
    continues: str | None = None  # "content" or "reasoning"
    has_schema: bool = False
    is_partial: bool = False

    @property
    def name(self) -> str:
        return f"{self.template}:{self.line}"


class Reader:
    """
    Runs the tests as far as they are data.

    Attributes:
        cases: those that were read.
        unread: why not, by line.
    """

    def __init__(self, source: str) -> None:
        self.cases: list[Case] = []
        self.unread: dict[int, str] = {}
        tree = tree_of(source)
        self._functions = {_function(n): n for n in tree if isinstance(n, Block)}
        names: dict[str, Any] = {"detailed_debug": False}
        for node in tree:
            if isinstance(node, Statement):
                with suppress(*_UNLIKE_DATA):
                    self._do(node.tokens, names)
        self._body(self._functions[MAIN], names)

    def _body(self, block: Block, names: dict[str, Any]) -> None:
        for node in block.body:
            if isinstance(node, Statement):
                self._statement(node.tokens, names)
            elif not node.head:
                self._body(node, dict(names))
            elif node.head[0].text == "for":
                self._loop(node, names)
            else:
                self._skip(node)

    def _loop(self, block: Block, names: dict[str, Any]) -> None:
        head = block.head[2:-1]  # without "for (" and ")"
        at = _place(head, ":")
        for value in self._value(head[at + 1 :], names):
            self._body(block, names | {head[at - 1].text: value})

    def _skip(self, block: Block) -> None:
        """A case in such a block is one that is not read."""
        for node in block.body:
            tokens = node.tokens if isinstance(node, Statement) else node.head
            if _runs(tokens):
                self.unread[tokens[0].line] = f"in a block of {block.head[0].text}"
            if isinstance(node, Block):
                self._skip(node)

    def _statement(self, tokens: list[Token], names: dict[str, Any]) -> None:
        try:
            self._do(tokens, names)
        except _UNLIKE_DATA as error:
            if _runs(tokens):
                self.unread[tokens[0].line] = str(error)

    def _do(self, tokens: list[Token], names: dict[str, Any]) -> None:
        words = [token.text if token.kind != "text" else "" for token in tokens]
        at = _place(tokens, "=")
        if words[1:2] == ["("] and words[0] in self._functions:
            self._run_function(words[0], tokens, names)
        elif words[1:2] == ["."] and at == 3:
            setattr(names[words[0]], words[2], self._value(tokens[4:], names))
        elif words[1:2] == ["."]:
            self._value(tokens, names)
        elif at < len(tokens):
            names[words[at - 1]] = self._value(tokens[at + 1 :], names)
        elif "{" in words:
            at = words.index("{")
            value = self._value(tokens[at:], names)
            names[words[at - 1]] = _object(words[:at], value)
        elif words[0] == "common_chat_msg" and len(words) == 2:
            names[words[1]] = Message(role="")

    def _run_function(
        self, name: str, tokens: list[Token], names: dict[str, Any]
    ) -> None:
        block = self._functions[name]
        values = self._value([Token("sign", "{", 0), *tokens[2:-1], *_END], names)
        head = block.head[_place(block.head, "(") + 1 : -1]
        parameters = [part[-1].text for part in _split(head)]
        self._body(block, names | dict(zip(parameters, values, strict=True)))

    def _value(self, tokens: list[Token], names: dict[str, Any]) -> Any:
        def call(name: str, values: list[Any], owner: Any) -> Any:
            if owner is None and name in MAKERS:
                return MAKERS[name](*values)
            if owner is None:
                raise Unread(f"line {tokens[0].line}: {name} is not known")
            if name == "test":
                return Case(tokens[0].line, owner, values[0])
            if name == "run":
                self.cases.append(owner)
                return None
            return _with(owner, name, *values)

        return Expression(tokens, names, call).value()


_END = [Token("sign", "}", 0)]


def _said(
    content: str,
    reasoning: str = "",
    tool: str = "",
    arguments: str = "",
    id_: str = "",
) -> Message:
    calls = [(tool, arguments, id_)] if tool or id_ else []
    return Message("assistant", content, reasoning, calls)


def _said_with_calls(reasoning: str, content: str, pairs: list[Any]) -> Message:
    calls = [(tool, arguments, "") for tool, arguments in pairs]
    return Message("assistant", content, reasoning, calls)


MAKERS: dict[str, Callable[..., Any]] = {  # the helpers of the tests
    "peg_tester": lambda path, _=None: path.rpartition("/")[2],
    "simple_assist_msg": _said,
    "message_with_tool_calls": lambda tool, args: _said("", "", tool, args),
    "message_with_content_and_tool_call": lambda text, tool, args: _said(
        text, "", tool, args
    ),
    "message_with_tool_calls_and_reasoning": lambda tool, args, why: _said(
        "", why, tool, args
    ),
    "message_with_reasoning_and_tool_call": lambda why, tool, args: _said(
        "", why, tool, args
    ),
    "message_with_reasoning_content_and_multiple_tool_calls": _said_with_calls,
}
OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {  # of a case
    "reasoning_format": lambda name: {"takes_reasoning": not name.endswith("NONE")},
    "tools": lambda tools: {"tools": [_tool(tool) for tool in tools]},
    "messages": lambda messages: {"messages": messages},
    "enable_thinking": lambda value: {"enable_thinking": value},
    "is_partial": lambda value: {"is_partial": value},
    "continue_final_message": lambda name: {
        "continues": name.rpartition("_")[2].lower()
    },
    "json_schema": lambda _: {"has_schema": True},
    "expect": lambda message: {"expected": message},
}
EXPECTED: dict[str, Callable[[Any], dict[str, Any]]] = {  # fields of the message
    "expect_content": lambda text: {"content": text},
    "expect_reasoning": lambda text: {"reasoning_content": text},
    "expect_tool_calls": lambda calls: {
        "tool_calls": [(tool, args, id_ or "") for tool, args, id_ in calls]
    },
}
# Of what is generated or rendered, not of what is read.
IDLE = {
    "add_generation_prompt",
    "expect_reconstruction",
    "parallel_tool_calls",
    "tool_choice",
}


def _with(case: Case, option: str, value: Any = True) -> Case:
    """*case* with an option of the builder."""
    if option in EXPECTED:
        expected = replace(case.expected, **EXPECTED[option](value))
        return replace(case, expected=expected)
    if option in IDLE:
        return case
    if option not in OPTIONS:
        raise Unread(f"line {case.line}: the option {option} is not known")
    return replace(case, **OPTIONS[option](value))


def _object(words: list[str], values: list[Any]) -> Any:
    if "vector" in "".join(words):
        return [_tool(value) for value in values]
    if "common_chat_tool" in words:
        return _tool(values)
    role, content, *_ = values
    return Message(role, content if isinstance(content, str) else "")


def _tool(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    name, description, parameters = value
    about = {"name": name, "description": description}
    function = about | {"parameters": json.loads(parameters)}
    return {"type": "function", "function": function}


def _function(block: Block) -> str:
    at = _place(block.head, "(")
    return block.head[at - 1].text if at < len(block.head) else ""


def _runs(tokens: list[Token]) -> bool:
    return any(token.text == "run" and token.kind == "name" for token in tokens)


def _place(tokens: list[Token], sign: str) -> int:
    """Of the first *sign* that is in no brackets, or opens some; the end if there is none."""
    depth = 0
    for at, token in enumerate(tokens):
        if token.kind != "sign":
            continue
        if token.text == sign and depth == 0:
            return at
        depth += (token.text in "([{") - (token.text in ")]}")
    return len(tokens)


def _split(tokens: list[Token]) -> Iterator[list[Token]]:
    while tokens:
        at = _place(tokens, ",")
        yield tokens[:at]
        tokens = tokens[at + 1 :]
