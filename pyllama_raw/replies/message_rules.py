"""Rules for replies of several messages, whose headers say what they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyllama_raw.replies.call_rules import CallRules
from pyllama_raw.replies.lark import Lark, Parts, Rule, Spelled
from pyllama_raw.replies.parser import ReplyParser
from pyllama_raw.replies.parts import Part, Reasoning
from pyllama_raw.replies.spec import MessageRule, MessagesSpec, ReplySpec
from pyllama_raw.replies.tool_schemas import Tool

SPACE = re.compile(r"(?= )")


class MessageRules:
    """Messages with written headers; those of a call have calls of *tools*."""

    def __init__(
        self,
        lark: Lark,
        spec: ReplySpec,
        messages: MessagesSpec,
        calls: CallRules,
        tools: Sequence[Tool],
    ) -> None:
        self._lark, self._spec, self._messages = lark, spec, messages
        self._calls, self._tools = calls, tools
        between = "".join([*messages.end[:1], messages.start[0]])
        self._between = lark.delimiter(between)
        self._until = lark.until([between])
        plain, _ = lark.split([between])
        self._rest = lark.terminal(lark.without(plain))

    def start(self, prefix: str, *, must: bool, parallel: bool) -> str:
        """Rule of what follows *prefix*, the end of the prompt."""
        lark, between = self._lark, self._lark.row(self._between)
        call = lark.one_of(self._called())
        again = f"({between} {call})*" if parallel else ""
        if must:
            thought = lark.one_of(self._headers("reasoning"))
            reply = lark.rule(f"({thought} {self._until})* {call} {again}")
        else:
            free = lark.one_of(self._headers("reasoning", "content"))
            piece = f"{free} {self._until}"
            before = f"({piece} | {call} {between})*" if parallel else f"({piece})*"
            reply = lark.rule(f"{before} ({free} {self._rest} | {call})")
        if not self._in_body(prefix):
            return reply
        end = "" if must else f" | {self._rest}"
        return lark.rule(f"{self._until} {reply}{end}")

    def _headers(self, *kinds: str) -> Sequence[Parts]:
        lark, middle = self._lark, self._messages.middle
        return [
            [*lark.delimiter(rule.written), *lark.first_of(middle)]
            for rule in self._messages.rules
            if rule.kind in kinds
        ]

    def _called(self) -> Sequence[Parts]:
        """Messages that are calls."""
        found: list[Parts] = []
        for rule in self._messages.rules:
            for tool in self._tools if rule.kind == "call" else ():
                body = self._body(rule, tool)
                for written in self._spellings(rule, tool):
                    header = self._lark.form(written, {"name": Spelled(tool.name)})
                    middle = self._lark.first_of(self._messages.middle)
                    found.append([*header, *middle, body])
        return found

    def _body(self, rule: MessageRule, tool: Tool) -> Rule:
        if "(?P<name>" in rule.header:
            return self._calls.arguments(tool)
        return self._calls.all()

    def _spellings(self, rule: MessageRule, tool: Tool) -> Sequence[str]:
        """Headers of a call: its recipient may stand after what it is, where that is read."""
        first, *rest = rule.written.split("<", 1)
        kind, *more = SPACE.split("<" + rest[0], maxsplit=1) if rest else ("",)
        moved = kind + first + "".join(more)
        written = [
            text
            for text in dict.fromkeys([rule.written, moved])
            if self._is_read(rule, text, tool)
        ]
        if not written:
            text = f"the format of the model has no place for the name {tool.name!r}"
            raise tool.bad(text)
        return written

    def _is_read(self, rule: MessageRule, written: str, tool: Tool) -> bool:
        """Whether the first rule for a header is *rule*, with the name of *tool*."""
        header = written.replace("{name}", tool.name)
        delimiters = [*self._messages.middle, *self._spec.special]
        for other in self._messages.rules:
            if found := re.fullmatch(other.header, header, re.DOTALL):
                name = found.groupdict().get("name", tool.name)
                is_whole = not any(text in tool.name for text in delimiters)
                return other is rule and name == tool.name and is_whole
        return False

    def _in_body(self, prefix: str) -> bool:
        """Whether the prompt ends within a message, after its header."""
        headers = [
            rule.written for rule in self._messages.rules if rule.kind == "content"
        ]
        for header in headers:
            text = header + self._messages.middle[0]
            parts = self._parts(prefix, text + "x")
            if "".join(part.text for part in parts if hasattr(part, "text")) == "x":
                return False
        return any(isinstance(part, Reasoning) for part in self._parts(prefix, "x"))

    def _parts(self, prefix: str, text: str) -> list[Part]:
        parser = ReplyParser(self._spec, prefix=prefix)
        fed = [parser.feed(*piece) for piece in self._spec.pieces(text)]
        return [part for parts in (*fed, parser.finish()) for part in parts]
