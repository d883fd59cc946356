"""Rules for replies of several messages, whose headers say what they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pyllama_raw.replies.call_rules import CallRules
from pyllama_raw.replies.lark import Lark, Parts, Rule, Spelled
from pyllama_raw.replies.parser import parts_of
from pyllama_raw.replies.parts import Content, Reasoning, text_of
from pyllama_raw.replies.spec import MessageRule, MessagesSpec
from pyllama_raw.replies.tool_schemas import Tool

SPACE = re.compile(r"(?= )")


class MessageRules:
    """
    Messages with written headers; those of a call have calls of the tools of *calls*.

    Args:
        calls: None: there are no calls.
        may_think: there may be messages of reasoning.
    """

    def __init__(
        self,
        lark: Lark,
        messages: MessagesSpec,
        calls: CallRules | None,
        *,
        may_think: bool = True,
    ) -> None:
        self._lark, self._messages, self._calls = lark, messages, calls
        self._may_think = may_think
        between = "".join([*messages.end[:1], messages.start[0]])
        self._between = lark.row(lark.delimiter(between))
        self._until = lark.until([between])
        self._rest = lark.terminal(lark.without(lark.plain([between])))

    def start(self, prefix: str, *, must: bool, answer: str | None = None) -> str:
        """
        Rule of what follows *prefix*, the end of the prompt.

        Args:
            must: the last messages are calls.
            answer: the body of a rule for the content, where it has to have a form.
        """
        lark, between = self._lark, self._between
        place = self._place(prefix)
        if not must and answer is None:
            reply = self._free()
            if place != "reasoning":
                return reply
            return f"{self._until} {reply} | {self._rest}"
        last: list[str] = []
        if self._calls:
            call = lark.one_of(self._called())
            again = f"({between} {call})*" if self._calls.parallel else ""
            last.append(f"{call} {again}")
        if answer is not None and not must:
            body, [header, *_] = lark.rule(answer), self._headers("content")
            if place == "content":
                return body
            last.append(f"{lark.row(header)} {body}")
        thoughts = self._headers("reasoning") if self._may_think else ()
        before = f"({lark.one_of(thoughts)} {self._until})*" if thoughts else ""
        reply = lark.rule(f"{before} ({' | '.join(last)})")
        return reply if place != "reasoning" else f"{self._until} {reply}"

    def _free(self) -> Rule:
        """Messages of any kind, with calls among them."""
        lark, calls = self._lark, self._calls
        assert calls is not None
        call = lark.one_of(self._called())
        free = lark.one_of(self._headers("reasoning", "content"))
        piece = f"{free} {self._until}"
        again = f" | {call} {self._between}" if calls.parallel else ""
        return lark.rule(f"({piece}{again})* ({free} {self._rest} | {call})")

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
        calls = self._calls
        assert calls is not None
        for rule in self._messages.rules:
            for tool in calls.tools if rule.kind == "call" else ():
                is_named = "(?P<name>" in rule.header
                body = calls.arguments(tool) if is_named else calls.all()
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

    def _place(self, prefix: str) -> Literal["", "reasoning", "content"]:
        """The kind of the message in which the prompt ends, after its header; empty: in none."""
        spec, middle = self._lark.spec, self._messages.middle[0]
        for rule in self._messages.rules:
            if rule.kind == "content":
                parts = parts_of(spec, f"{rule.written}{middle}x", prefix=prefix)
                if text_of(parts, Content) + text_of(parts, Reasoning) == "x":
                    return ""
        parts = parts_of(spec, "x", prefix=prefix)
        return "reasoning" if text_of(parts, Reasoning) else "content"
