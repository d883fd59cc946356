"""
Specifications of how families of models write reasoning and calls of tools, as data.

A delimiter is given as its spellings: the first is the one to write, all are read. Where several
match, the one that begins first is taken, and of these the longest, so white space that belongs to
a delimiter is a spelling of its own (`"\\n</parameter>"` before `"</parameter>"`).

A delimiter may hold special tokens of a vocabulary, alone or between text
(`<|channel|>final<|message|>`). `ReplySpec.bound` finds them. They are matched as tokens only
then: text that spells them is text.

A form says how a name, an id, a key or a type stand in a piece of text: `functions.{name}:{index}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, lru_cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pyllama_raw.replies.source import MARK, Delimiters

Spellings = tuple[Annotated[str, Field(min_length=1)], ...]


class SpecPart(BaseModel):
    """A part of a specification, which never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReasoningSpec(SpecPart):
    """Text that a model thinks, between two delimiters."""

    start: Spellings = ("<think>",)
    end: Spellings = ("</think>",)
    trim: bool = True
    """White space at both ends of reasoning, and after its end, belongs to the delimiters."""
    anywhere: bool = False
    """Reasoning may begin after text. Otherwise its start is text there."""
    calls: bool = False
    """A call ends reasoning too."""


class ObjectCall(SpecPart):
    """A call is an object of JSON: `{"name": "f", "arguments": {}}`."""

    kind: Literal["object"] = "object"
    name: str | None = "name"
    """The key of the name; None where the name itself is the key of the arguments."""
    arguments: str = "arguments"
    id: str | None = None
    """The key of the id."""
    array: bool = False
    """Calls are written as an array. (Both are read.)"""


class Headed(SpecPart):
    """A call that begins with a header, which has the name."""

    header: Spellings = ("{name}",)
    """Forms of the header: {name}, {id} and {index}."""
    header_end: Spellings = ()
    """A header ends before a parameter and before the end of its call too."""
    header_is_id: bool = False


class JsonCall(Headed):
    """Arguments are JSON after the header: `f[ARGS]{}`."""

    kind: Literal["json"] = "json"


class TaggedCall(Headed):
    """Each argument is text between tags: `<parameter=key>value</parameter>`."""

    kind: Literal["tagged"] = "tagged"
    start: Spellings
    """Begins a parameter, before its key."""
    key: Spellings = ("{key}",)
    """Forms between start and middle: {key} and {type}, which is string or true for a string."""
    middle: Spellings
    """Ends the key and begins the value."""
    end: Spellings
    """Ends a value; may have the {key}."""
    quotes: tuple[tuple[str, str], ...] = ()
    """Pairs that a value may stand between, as in CDATA."""
    nested: bool = False
    """The values of arrays and objects are tagged as parameters are."""


class LiteralCall(Headed):
    """Arguments are literals with keys: `f(a=1)` of Python, `f{a:1}`."""

    kind: Literal["literal"] = "literal"
    close: Literal[")", "}"] = ")"
    """Ends the arguments; header_end begins them."""
    assign: Literal["=", ":"] = "="
    quotes: Spellings = ('"', "'", '"""', "'''")
    """Delimiters of a string, the same on both sides. Between quotes of Python, its escapes are read."""
    array: bool = False
    """Calls are written as an array. (Both are read.)"""


CallLayout = Annotated[
    ObjectCall | JsonCall | TaggedCall | LiteralCall, Field(discriminator="kind")
]


class CallsSpec(SpecPart):
    """Calls: `open (start call end)... close`."""

    layout: CallLayout = ObjectCall()
    open: Spellings = ()
    """Begins a section of calls."""
    close: Spellings = ()
    start: Spellings = ()
    """Begins a call, in a section or without one."""
    end: Spellings = ()
    separator: str = ""
    """Text between two calls, as it is written. (White space, a comma and a semicolon are read.)"""
    bare: bool = False
    """Calls of tools that are known may begin a reply without any delimiter."""
    trim: bool = True
    """White space between text and calls belongs to the calls."""
    id_length: int | None = None
    """Ids are this many letters and digits, in models that take no others."""


class MessageRule(SpecPart):
    """Meaning of a message, by its header."""

    header: str
    """A regular expression of the whole header. Its group `name`, if any, is that of a tool."""
    kind: Literal["content", "reasoning", "call"]
    written: str
    """The header to write, with the {name} of the tool."""


class MessagesSpec(SpecPart):
    """A reply of several messages, whose headers say what they are: `start header middle ... end`."""

    start: Spellings
    middle: Spellings
    end: Spellings = ()
    rules: tuple[MessageRule, ...]
    """The first that matches holds. A header without a rule is text."""

    def rule_of(self, header: str) -> tuple[MessageRule, re.Match[str]] | None:
        """The rule of a message with this *header*, and its match."""
        for rule in self.rules:
            if match := re.fullmatch(rule.header, header, re.DOTALL):
                return rule, match
        return None


class ReplySpec(SpecPart):
    """
    The way in which the replies of a family of models are taken apart.

    It is JSON both ways: `ReplySpec.model_validate_json`, `spec.model_dump_json`.
    """

    markers: tuple[str, ...] = ()
    """Texts that a chat template of the family has, all of them."""
    reasoning: ReasoningSpec | None = None
    calls: CallsSpec | None = None
    messages: MessagesSpec | None = None
    ignored: Spellings = ()
    """Delimiters without meaning, as those around the text of an answer."""
    special: frozenset[str] = frozenset()
    """Special tokens of a vocabulary that the delimiters have; see `bound`."""

    def bound(self, is_special: Callable[[str], bool]) -> ReplySpec:
        """
        This specification for one vocabulary.

        Args:
            is_special: tells whether a text is the name of one special token. It is asked about
                all pieces of all delimiters, some thousands: once a model, not once a request.

        Returns:
            A copy whose `special` are the names to feed with `special=True`. Other tokens are
            fed as the text that they are.
        """
        texts = strings_of(self.model_dump(exclude={"markers", "special"}))
        names = frozenset(
            name for text in texts for name in special_in(text, is_special)
        )
        return self.model_copy(update={"special": names})

    @property
    def delimiters(self) -> frozenset[str]:
        """
        The delimiters of what is not content, without white space around them.

        Empty: all of a reply is content.
        """
        parts = (self.reasoning, self.calls, self.messages)
        fields = ("start", "end", "open", "close", "middle")
        texts = {
            text.strip()
            for part in parts
            for name in fields
            for text in getattr(part, name, ())
        }
        return frozenset(texts - {""})

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """*text* as text and as special tokens, which have True beside them."""
        names = sorted(self.special, key=len, reverse=True)
        texts = (
            re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        )
        return [(piece, n % 2 == 1) for n, piece in enumerate(texts) if piece]


def special_in(text: str, is_special: Callable[[str], bool]) -> Iterator[str]:
    """The special tokens in *text*; where one is within another, the longest."""
    at = 0
    while at < len(text):
        end = next((n for n in range(len(text), at, -1) if is_special(text[at:n])), at)
        if end > at:
            yield text[at:end]
        at = max(end, at + 1)


def strings_of(value: Any) -> Iterator[str]:
    """All strings in *value*, a tree of dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_of(item)


@cache
def bundled() -> dict[str, ReplySpec]:
    """The specifications that come with this package, by the names of their families."""
    folder = files("pyllama_raw.replies") / "specs"
    paths = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".json"): ReplySpec.model_validate_json(
            file.read_bytes()
        )
        for file in paths
    }


# -- delimiters, ready to be looked for --------------------------------------------------

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
        # Content that has a form may spell all delimiters but those with special tokens.
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
        # A header without an end of its own goes on up to whatever comes next.
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
    for pattern in forms:
        if match := pattern.fullmatch(text):
            return {key: value for key, value in match.groupdict().items() if value}
    return None
