"""Rules for calls of tools, as a specification writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from pyllama_raw.replies.argument_rules import Literals, tagged
from pyllama_raw.replies.lark import Lark, Parts, Rule, Spelled
from pyllama_raw.replies.source import LIMIT
from pyllama_raw.replies.spec import (
    CallsSpec,
    Headed,
    LiteralCall,
    ObjectCall,
    TaggedCall,
)
from pyllama_raw.replies.tables import FIELD, matched, tables_of
from pyllama_raw.replies.tool_schemas import Tool

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
        as_json = beside_json and calls.bare and isinstance(calls.layout, ObjectCall)
        if as_json and not (opening or calls.start):
            return self._objects()
        choices: list[Parts] = [[self.section(opening)]]
        if self.parallel and calls.open and calls.close and not self._brackets[0]:
            again = self.section([Spelled(calls.separator), *opening])
            choices = [[*choices[0], Rule(f"{again}*")]]
        if as_json:
            choices.append([self._objects()])
        elif calls.bare and calls.open:
            choices.append([self.section([], is_open=False)])
        return lark.one_of(choices)

    def _objects(self) -> Rule:
        """One call of any tool, as JSON by a schema."""
        layout = self.calls.layout
        assert isinstance(layout, ObjectCall)
        found: list[Parts] = []
        for tool in self.tools:
            names = {layout.name: {"const": tool.name}} if layout.name else {}
            key = layout.arguments if layout.name else tool.name
            make = partial(self._object, tool, names, key)
            rule = tool.kept("all", tool.schema, make)
            found += [] if rule is None else [[rule]]
        return self._lark.one_of(found)

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
        if layout.name is None:
            return [[Spelled(f"{{{name}: "), arguments, Spelled("}"), *end]]
        given = f"{json.dumps(layout.name)}: {name}, {json.dumps(layout.arguments)}: "
        begin, close = Spelled("{" + given), [Spelled("}"), *end]
        plain: Parts = [begin, arguments, *close]
        if layout.id is None:
            return [plain]
        id_: Parts = [Spelled(f'{json.dumps(layout.id)}: "'), self._id, Spelled('"')]
        return [
            plain,
            [Spelled("{"), *id_, Spelled(f", {given}"), arguments, *close],
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
        if isinstance(layout, TaggedCall):
            return [*header, tagged(lark, layout, tool, end)]
        if isinstance(layout, LiteralCall):
            values = Literals(lark, layout, tool)
            given = values.entries(tool.schema, layout.assign, layout.close)
            return [*header, given, *end]
        return [*header, self.arguments(tool), *end]


def check_name(lark: Lark, layout: Headed, tool: Tool) -> None:
    """Raise BadSchema if a header has no place for the name of *tool*."""
    fields = {"name": tool.name, "id": "a", "index": "0"}
    header = FIELD.sub(lambda field: fields[field[1]], layout.header[0])
    found = matched(tables_of(lark.spec).headers, header)
    ends = [*layout.header_end, *lark.spec.special]
    is_cut = any(end.strip() and end.strip() in tool.name for end in ends)
    if not found or found["name"] != tool.name or len(header) > LIMIT or is_cut:
        raise tool.bad(
            f"the format of the model has no place for the name {tool.name!r}"
        )
