"""
Rules for calls of tools, in a grammar for llguidance that is being written.

A `Lark` has the delimiters of a specification. The rules of calls are as the specification writes
them: their names, then their arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pyllama_raw.replies.calls import STRING, WORD
from pyllama_raw.replies.schemas import (
    NAMES,
    NOTES,
    TEXTS,
    Tool,
    text_pattern,
    types_of,
    values_of,
    variants,
)
from pyllama_raw.replies.source import LIMIT
from pyllama_raw.replies.spec import (
    FIELD,
    CallsSpec,
    Headed,
    LiteralCall,
    ObjectCall,
    ReplySpec,
    TaggedCall,
    matched,
    tables_of,
)

SPECIAL = re.compile(r"\\.|[/\n\r]", re.DOTALL)  # in a pattern, and escapes
WRITTEN = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}


def regex(pattern: str) -> str:
    """A regular expression as Lark has it."""
    inside = SPECIAL.sub(lambda match: WRITTEN.get(match[0], match[0]), pattern)
    return f"/{inside}/"


class Spelled(str):
    """Text as it is written."""

    __slots__ = ()


class Rule(str):
    """Term of the grammar for a part: the name of a rule, or a token."""

    __slots__ = ()


Parts = Sequence[Spelled | Rule]


class Lark:
    """
    Rules of a grammar.

    The lexer of llguidance takes the longest text that some terminal has, and never goes back. So
    texts that follow each other are one terminal, and a text up to a delimiter ends with it.
    """

    def __init__(self, spec: ReplySpec, ids: Mapping[str, int]) -> None:
        """
        Args:
            ids: tokens of the special names in *spec*.
        """
        self.spec = spec
        self._ids = ids
        self._names: dict[tuple[str, str], str] = {}

    def grammar(self, start: str) -> str:
        rules = (f"{name}: {body}" for (body, _), name in self._names.items())
        return "\n".join([f"start: {start}", *rules])

    def rule(self, body: str) -> Rule:
        return self._named(body, "r{}")

    def one_of(self, choices: Iterable[Parts]) -> Rule:
        return self.rule(" | ".join(dict.fromkeys(map(self.row, choices))))

    def terminal(self, body: str) -> Rule:
        return self._named(body, "T{}")

    def first(self, body: str) -> Rule:
        """The shortest text that *body*, of a terminal, matches."""
        return self._named(self.terminal(body), "r{}[lazy]")

    def row(self, parts: Parts) -> str:
        """*parts* after each other."""
        row: list[Spelled | Rule] = []
        # Texts that follow each other are one terminal; empty parts are none.
        for part in parts:
            if isinstance(part, Spelled) and row and isinstance(row[-1], Spelled):
                row[-1] = Spelled(row[-1] + part)
            elif part:
                row.append(part)
        return (
            " ".join(json.dumps(p) if isinstance(p, Spelled) else p for p in row)
            or '""'
        )

    def delimiter(self, text: str) -> Parts:
        """A delimiter: special tokens are tokens, the rest is text."""
        return [
            Rule(f"<[{self._ids[piece]}]>") if special else Spelled(piece)
            for piece, special in self.spec.pieces(text)
        ]

    def first_of(self, spellings: Sequence[str]) -> Parts:
        """The spelling to write."""
        return self.delimiter(spellings[0]) if spellings else []

    def form(self, text: str, fields: Mapping[str, Spelled | Rule]) -> Parts:
        """A form with its fields, which make no special token."""
        return [
            part
            for n, piece in enumerate(FIELD.split(text))
            for part in ([fields[piece]] if n % 2 else self.delimiter(piece))
        ]

    @property
    def special(self) -> list[Rule]:
        """All special tokens of the specification."""
        return [Rule(f"<[{self._ids[name]}]>") for name in sorted(self.spec.special)]

    def tokens_in(self, text: str) -> list[Rule]:
        """The special tokens of the delimiter *text*."""
        return [part for part in self.delimiter(text) if isinstance(part, Rule)]

    def without(self, texts: Sequence[str], pattern: str = "(?s:.*)") -> str:
        """The body of a terminal: text that *pattern* matches and that has none of *texts*."""
        body = regex(pattern)
        for text in texts:
            body += f" & ~({ANY} {json.dumps(text)} {ANY})"
        return f"({body})"

    def until(
        self,
        ends: Sequence[str],
        pattern: str = "(?s:.*)",
        never: Sequence[str] = (),
    ) -> Rule:
        """
        Text that *pattern* matches up to the first of *ends*, which belongs to it.

        Args:
            never: texts that it does not have.
        """
        plain = self.plain(ends)
        text = self.without([*plain, *never], pattern)
        # An end with a special token: the text before the token belongs to the terminal.
        choices: list[str] = []
        for parts in (self.delimiter(end) for end in ends if end not in plain):
            n = int(isinstance(parts[0], Spelled))  # parts that are of the terminal
            lead = "".join(map(json.dumps, parts[:n]))
            before = self.terminal(f"{text} {lead}")
            choices.append(f"{before} {self.row(parts[n:])}")
        # Ends that are text alone: the shortest text up to any of them.
        if plain:
            written = " | ".join(map(json.dumps, plain))
            choices.append(self.first(f"{text} ({written})"))
        return self.rule(" | ".join(choices))

    def plain(self, texts: Iterable[str]) -> list[str]:
        """The ones among *texts* that have no special token."""
        return [text for text in texts if not self.tokens_in(text)]

    def _named(self, body: str, form: str) -> Rule:
        new = form.format(len(self._names))
        name = self._names.setdefault((body, form), new)
        return Rule(name.removesuffix("[lazy]"))


ANY = "/(?s:.*)/"


INDEX = "/[0-9]{1,3}/"


class CallRules:
    """Calls of *tools*; one after the other, or only one."""

    def __init__(
        self, lark: Lark, calls: CallsSpec, tools: Sequence[Tool], *, parallel: bool
    ) -> None:
        self._lark, self.calls, self.tools = lark, calls, tools
        self.parallel = parallel
        layout = calls.layout
        self._id = Rule(f"/[a-zA-Z0-9]{{{calls.id_length or '1,64'}}}/")
        is_array = isinstance(layout, ObjectCall | LiteralCall) and layout.array
        self._brackets = ("[", "]") if is_array else ("", "")

    def all(self, *, beside_json: bool = False) -> Rule:
        """
        All calls of a reply.

        Args:
            beside_json: the reply may be JSON instead. A call that is an object without any
                delimiter is JSON, too, then: the lexer could not tell them apart otherwise.
        """
        lark, calls = self._lark, self.calls
        opening = lark.first_of(calls.open)
        # Calls that look like the answer are one of two schemas, and nothing else.
        as_json = beside_json and calls.bare and isinstance(calls.layout, ObjectCall)
        if as_json and not (opening or calls.start):
            return self._objects()
        # One section, or several one after the other where each has but one call.
        choices: list[Parts] = [[self.section(opening)]]
        if self.parallel and calls.open and calls.close and not self._brackets[0]:
            again = self.section([Spelled(calls.separator), *opening])
            choices = [[*choices[0], Rule(f"{again}*")]]
        # Models that need no delimiter may leave it out.
        if as_json:
            choices.append([self._objects()])
        elif calls.bare and calls.open:
            choices.append([self.section([], is_open=False)])
        return lark.one_of(choices)

    def _objects(self) -> Rule:
        """One call of any tool, as JSON by a schema."""
        layout = self.calls.layout
        assert isinstance(layout, ObjectCall)
        calls: list[Parts] = []
        for tool in self.tools:
            names = {layout.name: {"const": tool.name}} if layout.name else {}
            key = layout.arguments if layout.name else tool.name
            make = partial(self._object, tool, names, key)
            rule = tool.kept("all", tool.schema, make)
            calls += [] if rule is None else [[rule]]
        return self._lark.one_of(calls)

    def _object(self, tool: Tool, names: dict[str, Any], key: str, schema: Any) -> Rule:
        entries = {**names, key: {**schema, "type": "object"}}
        call = {
            "type": "object",
            "properties": entries,
            "required": list(entries),
            "additionalProperties": False,
        }
        return self._lark.rule(tool.json(call))

    def section(self, lead: Parts, *, is_open: bool = True) -> Rule:
        """A section of calls after *lead*, which begins it."""
        lark = self._lark
        first = self._items([*lead, Spelled(self._brackets[0])])
        close = lark.first_of(self.calls.close) if is_open else []
        tail = lark.row([Spelled(self._brackets[1]), *close])
        return lark.rule(f"{first} {self._more()} {tail}")

    def started(self, lead: Parts) -> Rule:
        """Calls without a section, the first after *lead*, which begins it."""
        return self._lark.rule(f"{self._items(lead, started=True)} {self._more()}")

    def arguments(self, tool: Tool) -> Rule:
        """Arguments that are JSON."""
        return self._lark.rule(tool.json(tool.schema))

    def _more(self) -> str:
        if not self.parallel:
            return ""
        return self._items([Spelled(self.calls.separator)]) + "*"

    def _items(self, lead: Parts, *, started: bool = False) -> Rule:
        """One call of any tool, after *lead*."""
        lark, calls = self._lark, self.calls
        start = [] if started else lark.first_of(calls.start)
        return lark.one_of(
            [*lead, *start, *call] for tool in self.tools for call in self._call(tool)
        )

    def _call(self, tool: Tool) -> Sequence[Parts]:
        """A call from after its start."""
        layout = self.calls.layout
        if not isinstance(layout, ObjectCall):
            return [self._headed(layout, tool)]
        arguments = self.arguments(tool)
        name = json.dumps(tool.name, ensure_ascii=False)
        end = self._lark.first_of(self.calls.end)
        if len(name) > LIMIT or not tool.name:
            raise tool.bad(f"a name of a tool has 1 to {LIMIT} characters")
        # The name is the key of the arguments.
        if layout.name is None:
            return [[Spelled(f"{{{name}: "), arguments, Spelled("}"), *end]]
        fields = f"{json.dumps(layout.name)}: {name}, {json.dumps(layout.arguments)}: "
        begin, close = Spelled("{" + fields), [Spelled("}"), *end]
        plain: Parts = [begin, arguments, *close]
        if layout.id is None:
            return [plain]
        # Without an id, with one in front, and with one at the end.
        id_: Parts = [Spelled(f'{json.dumps(layout.id)}: "'), self._id, Spelled('"')]
        return [
            plain,
            [Spelled("{"), *id_, Spelled(f", {fields}"), arguments, *close],
            [begin, arguments, Spelled(", "), *id_, *close],
        ]

    def _headed(self, layout: Headed, tool: Tool) -> Parts:
        lark = self._lark
        check_name(lark, layout, tool)
        fields: dict[str, Spelled | Rule] = {
            "name": Spelled(tool.name),
            "id": self._id,
            "index": Rule(INDEX),
        }
        header = [
            *lark.form(layout.header[0], fields),
            *lark.first_of(layout.header_end),
        ]
        end = lark.first_of(self.calls.end)
        # Arguments between tags, as literals, or as JSON.
        if isinstance(layout, TaggedCall):
            return [*header, tagged(lark, layout, tool, end)]
        if isinstance(layout, LiteralCall):
            values = Literals(lark, layout, tool)
            arguments = values.entries(tool.schema, layout.assign, layout.close)
            return [*header, arguments, *end]
        return [*header, self.arguments(tool), *end]


def check_name(lark: Lark, layout: Headed, tool: Tool) -> None:
    """Raise BadSchema if a header has no place for the name of *tool*."""
    fields = {"name": tool.name, "id": "a", "index": "0"}
    header = FIELD.sub(lambda field: fields[field[1]], layout.header[0])
    read = matched(tables_of(lark.spec).headers, header)
    ends = [*layout.header_end, *lark.spec.special]
    is_cut = any(end.strip() and end.strip() in tool.name for end in ends)
    if not read or read["name"] != tool.name or len(header) > LIMIT or is_cut:
        raise tool.bad(
            f"the format of the model has no place for the name {tool.name!r}"
        )


# -- arguments that are no JSON ----------------------------------------------------------

MAX_DEPTH = 16
NUMBERS = frozenset(
    ["type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
OPTIONAL_STRING = frozenset({"string", "null"})
LINE = Spelled("\n")


def tagged(lark: Lark, layout: TaggedCall, tool: Tool, end: Parts) -> Rule:
    """The parameters of a call and what ends it, each perhaps on a line of its own."""
    row: list[str] = []
    for key, schema, is_needed in tool.entries(tool.schema):
        make = partial(_parameter, lark, layout, tool, key)
        if (parameter := tool.kept(key, schema, make)) is not None:
            row.append(parameter + "?" * (not is_needed))
    return lark.rule(" ".join([*row, _on_a_line(lark, end)]))


def _on_a_line(lark: Lark, parts: Parts) -> Rule:
    if not parts or parts[0][:1].isspace():
        return lark.one_of([parts])
    return lark.one_of([parts, [LINE, *parts]])


def _parameter(
    lark: Lark, layout: TaggedCall, tool: Tool, key: str, declaration: object
) -> Rule:
    schema = tool.resolved(declaration)
    types = types_of(schema, tool.schema)
    is_text = types == STRING or (types == OPTIONAL_STRING and _is_free(schema, tool))
    form = layout.key[0]
    kind = next(iter(types)) if len(types) == 1 else "object"
    if 'string="{type}' in form:
        kind = "true" if types == STRING else "false"
    if "{type}" in form:
        is_text = types == STRING
    fields = matched(tables_of(lark.spec).keys, form.format(key=key, type=kind))
    if not fields or fields["key"] != key or len(key) > LIMIT:
        raise tool.bad(f"the format of the model has no place for the key {key!r}")
    begin = [
        *lark.first_of(layout.start),
        *lark.form(form, {"key": Spelled(key), "type": Spelled(kind)}),
        *lark.first_of(layout.middle),
    ]
    ends = [end.replace("{key}", key) for end in layout.end]
    # One of some texts, any text up to the end of the parameter, or JSON.
    if is_text and values_of(schema):
        value = lark.one_of(
            [Spelled(text), *lark.delimiter(ends[0])]
            for text in _texts(lark, tool, schema, ends)
        )
    elif is_text:
        is_plain = types != STRING
        pattern = "(?s:.*)" if is_plain else text_pattern(tool, schema)
        value = lark.until(ends, pattern)
    else:
        value = lark.one_of(
            [lark.rule(tool.json(schema)), *lark.delimiter(end)] for end in ends
        )
    return lark.rule(f"{_on_a_line(lark, begin)} {value}")


def _is_free(schema: Mapping[str, Any], tool: Tool) -> bool:
    """Whether any text is a value."""
    limits = set().union(*variants(schema, tool.schema)) - NOTES
    return limits <= {"type", "anyOf", "oneOf", "$ref"}


def _texts(
    lark: Lark, tool: Tool, schema: Mapping[str, Any], ends: Sequence[str]
) -> list[str]:
    """The texts that *schema* names."""
    tool.check(schema, TEXTS)
    texts = values_of(schema)
    plain = lark.plain(ends)
    for text in texts:
        if not isinstance(text, str) or any(end in text for end in plain):
            raise tool.bad(f"{text!r} cannot stand between the tags of the model")
    return list(texts)


class Literals:
    """Rules for literals with keys."""

    def __init__(self, lark: Lark, layout: LiteralCall, tool: Tool) -> None:
        self._lark, self._tool = lark, tool
        self._quote = layout.quotes[0]
        self._comma = Spelled(", " if layout.assign == "=" else ",")
        # What reads quotes of JSON reads JSON.
        self._value = self._json if '"' in layout.quotes else self._own

    def _json(self, declaration: Any, _: int) -> Rule:
        schema = self._tool.resolved(declaration)
        if schema.keys() - NOTES == {"type"} and schema["type"] == "boolean":
            words = ("true", "false", "True", "False")
            return self._lark.one_of([Spelled(word)] for word in words)
        return self._lark.rule(self._tool.json(schema))

    def entries(
        self, schema: Mapping[str, Any], assign: str, close: str, depth: int = 0
    ) -> Rule:
        """Keys and values in their order, with commas between them, and the bracket."""
        lark = self._lark
        # From the last key to the first: what may follow a key is known then. An optional key
        # may be left out, and its comma with it.
        first = following = lark.one_of([[Spelled(close)]])
        for key, of_key, is_needed in reversed(self._tool.entries(schema)):
            make = partial(self._pair, key, assign, depth + 1)
            if (entry := self._tool.kept(key, of_key, make)) is None:
                continue
            pair = [*entry, following]
            next_pair = [self._comma, *pair]
            first = lark.one_of([pair] if is_needed else [pair, [first]])
            following = lark.one_of(
                [next_pair] if is_needed else [next_pair, [following]]
            )
        return first

    def _pair(self, key: str, assign: str, depth: int, schema: Any) -> Parts:
        return [*self._key(key), Spelled(assign), self._value(schema, depth)]

    def _own(self, declaration: Any, depth: int) -> Rule:
        """A value whose strings stand between quotes of the model. Raises BadSchema."""
        tool, lark = self._tool, self._lark
        if depth > MAX_DEPTH:
            raise tool.bad(
                f"values are nested in each other more than {MAX_DEPTH} times"
            )
        schema = tool.resolved(declaration)
        # Alternatives, then values by name, then values by type.
        for word in ("anyOf", "oneOf"):
            if word in schema:
                tool.check(schema, frozenset({word}))
                return lark.one_of([[self._own(s, depth + 1)] for s in schema[word]])
        if values := values_of(schema):
            tool.check(schema, frozenset({"type", "enum", "const"}))
            return lark.one_of(map(self._constant, values))
        kinds = schema.get("type", ["string", "number", "boolean", "null"])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return lark.one_of([self._of(kind, schema, depth)] for kind in kinds)

    def _of(self, kind: object, schema: Mapping[str, Any], depth: int) -> Rule:
        tool, lark = self._tool, self._lark
        if kind == "string":
            text = lark.until([self._quote], text_pattern(tool, schema))
            return lark.one_of([[*lark.delimiter(self._quote), text]])
        if kind == "object":
            entries = self.entries(schema, ":", "}", depth)
            return lark.one_of([[Spelled("{"), entries]])
        if kind == "array":
            return self._array(schema, depth)
        # Numbers, booleans and null are written as JSON writes them.
        tool.check(schema, NUMBERS)
        return lark.rule(tool.json({**schema, "type": kind}))

    def _array(self, schema: Mapping[str, Any], depth: int) -> Rule:
        lark = self._lark
        self._tool.check(schema, frozenset({"type", "items", "minItems", "maxItems"}))
        item = self._own(schema.get("items", {}), depth + 1)
        lower, upper = int(schema.get("minItems", 0)), schema.get("maxItems")
        next_item = lark.one_of([[self._comma, item]])
        limit = "" if upper is None else max(int(upper) - 1, 0)
        items = f"{next_item}{{{max(lower - 1, 0)},{limit}}}" if limit != 0 else ""
        some = f'"[" {item} {items} "]"'
        choices = [some] if upper != 0 else []
        return lark.rule(" | ".join([*choices, *(['"[]"'] if not lower else [])]))

    def _constant(self, value: object) -> Parts:
        if isinstance(value, str):
            return self._quoted(value)
        if type(value) not in NAMES:
            raise self._tool.bad(f"{value!r} is no literal of the model")
        return [Spelled(json.dumps(value))]

    def _key(self, key: str) -> Parts:
        fits = WORD.fullmatch(key) and len(key) <= LIMIT
        return [Spelled(key)] if fits else self._quoted(key)

    def _quoted(self, text: str) -> Parts:
        if self._quote in text or "\\" in text:
            raise self._tool.bad(
                f"{text!r} cannot stand between the quotes of the model"
            )
        quote = self._lark.delimiter(self._quote)
        return [*quote, Spelled(text), *quote]
