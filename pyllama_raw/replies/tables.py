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

MAX_KEYS = 64  # of parameters whose ends are kept
FIELD = re.compile(r"\{(name|id|index|key|type)\}")
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
    FORMED = "content in which only special tokens are delimiters"


class Role(Enum):
    """Effect of a delimiter."""

    IGNORED = "ignored"
    THINK = "begins reasoning"
    ANSWER = "ends reasoning"
    OPEN = "begins a section of calls"
    START = "begins a call"
    MESSAGE = "begins a message"
    MESSAGE_END = "ends a message"


class Table(Delimiters):
    """Delimiters with their roles. The first role of a delimiter holds."""

    def __init__(self, pairs: Iterable[tuple[str, Role]]) -> None:
        self.roles: dict[str, Role] = {}
        for text, role in pairs:
            self.roles.setdefault(text, role)
        super().__init__(self.roles)


class Tables:
    """Delimiters of one specification, for each kind of text and for calls."""

    def __init__(self, spec: ReplySpec) -> None:
        self._spec = spec
        calls = spec.calls or CallsSpec()
        reasoning = spec.reasoning or ReasoningSpec(start=(), end=())
        messages = spec.messages or MessagesSpec(start=(), middle=(), rules=())
        common = {
            Role.IGNORED: spec.ignored,
            Role.ANSWER: reasoning.end,
            Role.THINK: reasoning.start,
            Role.MESSAGE: messages.start,
            Role.MESSAGE_END: messages.end,
        }
        opening = {Role.START: calls.start, Role.OPEN: calls.open}
        inside = opening if reasoning.calls else {}
        after = (Role.IGNORED, Role.MESSAGE, Role.MESSAGE_END)
        tokens = {
            role: [
                text
                for text in common[role]
                if any(name in text for name in spec.special)
            ]
            for role in after
        }
        self.kinds = {
            Kind.CONTENT: self._table({**common, **opening}),
            Kind.PLAIN: self._table(common),
            Kind.FORMED: self._table(tokens),
            Kind.REASONING: self._table(
                {Role.ANSWER: reasoning.end, **common, **inside}
            ),
        }
        self.middle = self._found(messages.middle)
        self.starts = self._found(calls.start)
        self.ends = self._found(calls.end)
        self.closes = self._found(calls.close)
        self.closing = self._found([*calls.end, *calls.close])
        if isinstance(calls.layout, Headed):
            self._headed(calls, calls.layout)

    def _headed(self, calls: CallsSpec, layout: Headed) -> None:
        self.headers = [form(text) for text in layout.header]
        self.header_end = self._found(layout.header_end)
        last = [*layout.header_end, *calls.end, *calls.close]
        if isinstance(layout, TaggedCall):
            last += layout.start
            self.parameter_starts = self.marked(layout.start)
            self.parameter = self._found([*layout.start, *calls.end])
            self.keys = [form(text) for text in layout.key]
            self.middle_of_parameter = self._found(layout.middle)
            self.quotes = Delimiters(begin for begin, _ in layout.quotes)
            self._value_ends = self.marked(layout.end)
            self.value_ends = lru_cache(MAX_KEYS)(self._ends_of)
        if isinstance(layout, LiteralCall):
            self.quotes = self._found(layout.quotes)
        self.header_last = self._found(last)

    def _ends_of(self, key: str) -> Delimiters:
        """The ends of a value of the parameter *key*."""
        return Delimiters(text.replace("{key}", key) for text in self._value_ends)

    def marked(self, texts: Iterable[str]) -> list[str]:
        """*texts* as they are in a source: special tokens are behind their mark."""
        return [
            "".join(
                MARK * special + piece for piece, special in self._spec.pieces(text)
            )
            for text in texts
        ]

    def _table(self, roles: Mapping[Role, Iterable[str]]) -> Table:
        return Table(
            (text, role) for role, texts in roles.items() for text in self.marked(texts)
        )

    def _found(self, texts: Iterable[str]) -> Delimiters:
        return Delimiters(self.marked(texts))


@lru_cache(maxsize=64)
def tables_of(spec: ReplySpec) -> Tables:
    return Tables(spec)


def form(text: str) -> re.Pattern[str]:
    """A form as a regular expression: `functions.{name}:{index}`."""
    parts = enumerate(FIELD.split(text))
    return re.compile("".join(FIELDS[p] if n % 2 else re.escape(p) for n, p in parts))


def matched(forms: Iterable[re.Pattern[str]], text: str) -> dict[str, str] | None:
    """The fields of *text* by the first form that it has."""
    text = text.replace(MARK, "").strip()
    found = next((match for form in forms if (match := form.fullmatch(text))), None)
    return found and {key: value for key, value in found.groupdict().items() if value}
