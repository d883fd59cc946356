"""Rules for replies of several messages, whose headers say what they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyllama_raw.replies.call_rules import CallRules
from pyllama_raw.replies.lark import Lark, Parts, Spelled
from pyllama_raw.replies.parser import parts_of
from pyllama_raw.replies.parts import Content, Reasoning, text_of
from pyllama_raw.replies.spec import MessageRule, MessagesSpec
from pyllama_raw.replies.tool_schemas import Tool

SPACE = re.compile(r"(?= )")


class MessageRules:
    """Messages with written headers; those of a call have calls of the tools of *calls*."""

    def __init__(self, lark: Lark, messages: MessagesSpec, calls: CallRules) -> None:
        self._lark, self._messages, self._calls = lark, messages, calls
        between = "".join([*messages.end[:1], messages.start[0]])
        self._between = lark.row(lark.delimiter(between))
        self._until = lark.until([between])
        self._rest = lark.terminal(lark.without(lark.plain([between])))

    def start(self, prefix: str, *, must: bool) -> str:
        """Rule of what follows *prefix*, the end of the prompt."""
        lark, between, parallel = self._lark, self._between, self._calls.parallel
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
        return f"{self._until} {reply}{end}"

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
            for tool in self._calls.tools if rule.kind == "call" else ():
                is_named = "(?P<name>" in rule.header
                body = self._calls.arguments(tool) if is_named else self._calls.all()
                for written in self._spellings(rule, tool):
                    header = self._lark.form(written, {"name": Spelled(tool.name)})
                    middle = self._lark.first_of(self._messages.middle)
                    found.append([*header, *middle, body])
        return found

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
        found = self._messages.rule_of(written.replace("{name}", tool.name))
        if found is None or found[0] is not rule:
            return False
        delimiters = [*self._messages.middle, *self._lark.spec.special]
        is_whole = not any(text in tool.name for text in delimiters)
        return is_whole and found[1].groupdict().get("name", tool.name) == tool.name

    def _in_body(self, prefix: str) -> bool:
        """Whether the prompt ends within a message, after its header."""
        spec, middle = self._lark.spec, self._messages.middle[0]
        for rule in self._messages.rules:
            if rule.kind == "content":
                parts = parts_of(spec, f"{rule.written}{middle}x", prefix=prefix)
                if text_of(parts, Content) + text_of(parts, Reasoning) == "x":
                    return False
        return bool(text_of(parts_of(spec, "x", prefix=prefix), Reasoning))
