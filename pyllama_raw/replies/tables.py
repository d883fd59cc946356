"""The delimiters of a specification, ready to be looked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache

from pyllama_raw.replies.source import MARK, Delimiters
from pyllama_raw.replies.spec import (
    CallsSpec,
    Headed,
    LiteralCall,
    MessagesSpec,
    ReasoningSpec,
    ReplySpec,
    TaggedCall,
)

FIELDS = {
    "name": r"""(?P<name>[^\s<>{}()\[\]"'`,;|=]+)""",
    "id": r"""(?P<id>[^\s<>{}()\[\]"'`,;]+)""",
    "index": r"\d*",
    "key": r"""(?P<key>[^<>"]+?)""",
    "type": r"(?P<type>[a-z]*)",
}


class Kind(Enum):
    """Kind of the text that is being read."""

    CONTENT = "content"
    PLAIN = "content in which nothing is a call"
    REASONING = "reasoning"
    HEADER = "the header of a message"


class Role(Enum):
    """Effect of a delimiter."""

    IGNORED = "ignored"
    THINK = "begins reasoning"
    ANSWER = "ends reasoning"
    OPEN = "begins a section of calls"
    START = "begins a call"
    MESSAGE = "begins a message"
    MESSAGE_END = "ends a message"


class Table:
    """Delimiters with their roles. The first role of a delimiter holds."""

    def __init__(self, texts: Mapping[Role, Iterable[str]]) -> None:
        self.roles: dict[str, Role] = {}
        for role, texts_of_role in texts.items():
            for text in texts_of_role:
                self.roles.setdefault(text, role)
        self.markers = Delimiters(self.roles)


class Tables:
    """Delimiters of one specification, for each kind of text and for calls."""

    def __init__(self, spec: ReplySpec) -> None:
        self.spec = spec
        self.special = Delimiters(spec.special)
        calls = spec.calls or CallsSpec()
        reasoning = spec.reasoning or ReasoningSpec(start=(), end=())
        messages = spec.messages or MessagesSpec(start=(), middle=(), rules=())
        delimiters = {
            Role.IGNORED: spec.ignored,
            Role.ANSWER: reasoning.end,
            Role.THINK: reasoning.start,
            Role.MESSAGE: messages.start,
            Role.MESSAGE_END: messages.end,
        }
        common = {role: self.marked(texts) for role, texts in delimiters.items()}
        thinking = {Role.ANSWER: common[Role.ANSWER], **common}
        opening = {
            Role.START: self.marked(calls.start),
            Role.OPEN: self.marked(calls.open),
        }
        self.without_calls = {
            Kind.CONTENT: Table(common),
            Kind.PLAIN: Table(common),
            Kind.REASONING: Table(thinking),
        }
        self.kinds = {**self.without_calls, Kind.CONTENT: Table({**common, **opening})}
        if reasoning.calls:
            self.kinds[Kind.REASONING] = Table({**thinking, **opening})
        self.middle = Delimiters(self.marked(messages.middle))
        self.rules = [
            (re.compile(rule.header, re.DOTALL), rule.kind) for rule in messages.rules
        ]
        self.calls = spec.calls
        self._calls(calls)

    def _calls(self, calls: CallsSpec) -> None:
        layout = calls.layout
        self.tagged = layout if isinstance(layout, TaggedCall) else None
        self.starts = Delimiters(self.marked(calls.start))
        self.ends = Delimiters(self.marked(calls.end))
        self.closes = Delimiters(self.marked(calls.close))
        self.closing = Delimiters(self.marked([*calls.end, *calls.close]))
        if not isinstance(layout, Headed):
            return
        self.headers = [form(text) for text in layout.header]
        ends = self.marked(layout.header_end)
        self.header_end = Delimiters(ends)
        last = [*ends, *self.marked(calls.end), *self.marked(calls.close)]
        if isinstance(layout, TaggedCall):
            self.parameter_starts = self.marked(layout.start)
            self.parameter = Delimiters(
                [*self.parameter_starts, *self.marked(calls.end)]
            )
            self.keys = [form(text) for text in layout.key]
            self.middle_of_parameter = Delimiters(self.marked(layout.middle))
            self.quotes = Delimiters(begin for begin, _ in layout.quotes)
            self._value_ends = self.marked(layout.end)
            self._all_value_ends = Delimiters(self._value_ends)
            last += self.parameter_starts
        if isinstance(layout, LiteralCall):
            self.literal_quotes = Delimiters(self.marked(layout.quotes))
        self.header_last = Delimiters(last)

    def value_ends(self, key: str) -> Delimiters:
        """The ends of a value of the parameter *key*."""
        if "{key}" not in "".join(self._value_ends):
            return self._all_value_ends
        return Delimiters(text.replace("{key}", key) for text in self._value_ends)

    def marked(self, texts: Iterable[str]) -> list[str]:
        """*texts* as they are in a source: special tokens are behind their mark."""
        return [
            "".join(MARK * special + piece for piece, special in self.spec.pieces(text))
            for text in texts
        ]


@lru_cache(maxsize=64)
def tables_of(spec: ReplySpec) -> Tables:
    return Tables(spec)


def form(text: str) -> re.Pattern[str]:
    """A form as a regular expression: `functions.{name}:{index}`."""
    parts = re.split(r"\{(name|id|index|key|type)\}", text)
    return re.compile(
        "".join(FIELDS[p] if n % 2 else re.escape(p) for n, p in enumerate(parts))
    )


def matched(forms: Iterable[re.Pattern[str]], text: str) -> dict[str, str] | None:
    """The fields of *text* by the first form that it has."""
    text = text.replace(MARK, "").strip()
    found = next((match for form in forms if (match := form.fullmatch(text))), None)
    return found and {key: value for key, value in found.groupdict().items() if value}
