"""Rules for calls of tools, as a specification writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pyllama_raw.replies.argument_rules import literals, tagged
from pyllama_raw.replies.calls import HEADER_LIMIT
from pyllama_raw.replies.json_text import LIMIT
from pyllama_raw.replies.lark import Lark, Parts, Rule, Text
from pyllama_raw.replies.spec import (
    CallsSpec,
    Headed,
    LiteralCall,
    ObjectCall,
    TaggedCall,
)
from pyllama_raw.replies.tables import matched, tables_of
from pyllama_raw.replies.tool_schemas import Tool

INDEX = "/[0-9]{1,3}/"


class CallRules:
    """Calls of *tools*; one after the other, or only one."""

    def __init__(
        self, lark: Lark, calls: CallsSpec, tools: Sequence[Tool], *, parallel: bool
    ) -> None:
        self._lark, self._calls, self._tools = lark, calls, tools
        self._parallel = parallel
        layout = calls.layout
        self._id = Rule(f"/[a-zA-Z0-9]{{{calls.id_length or '1,64'}}}/")
        is_array = isinstance(layout, ObjectCall | LiteralCall) and layout.array
        self._brackets = ("[", "]") if is_array else ("", "")

    def all(self) -> Rule:
        """All calls of a reply."""
        lark, calls = self._lark, self._calls
        opening = lark.first_of(calls.open)
        choices = [[self.section(opening)]]
        if self._parallel and calls.open and calls.close and not self._brackets[0]:
            again = self.section([Text(calls.separator), *opening])
            choices = [[*choices[0], Rule(f"{again}*")]]
        if calls.bare and calls.open:
            choices.append([self.section([], is_open=False)])
        return lark.one_of(choices)

    def section(self, lead: Parts, *, is_open: bool = True) -> Rule:
        """A section of calls after *lead*, which begins it."""
        lark = self._lark
        first = self._items([*lead, Text(self._brackets[0])])
        close = lark.first_of(self._calls.close) if is_open else []
        tail = lark.row([Text(self._brackets[1]), *close])
        return lark.rule(f"{first} {self._more()} {tail}")

    def started(self, lead: Parts) -> Rule:
        """Calls without a section, the first after *lead*, which begins it."""
        return self._lark.rule(f"{self._items(lead, started=True)} {self._more()}")

    def arguments(self, tool: Tool) -> Rule:
        """Arguments that are JSON."""
        return self._lark.rule(tool.json(tool.schema))

    def _more(self) -> str:
        if not self._parallel:
            return ""
        return self._items([Text(self._calls.separator)]) + "*"

    def _items(self, lead: Parts, *, started: bool = False) -> Rule:
        """One call of any tool, after *lead*."""
        lark, calls = self._lark, self._calls
        start = [] if started else lark.first_of(calls.start)
        return lark.one_of(
            [*lead, *start, *call] for tool in self._tools for call in self._call(tool)
        )

    def _call(self, tool: Tool) -> Sequence[Parts]:
        """A call from after its start."""
        layout = self._calls.layout
        if isinstance(layout, ObjectCall):
            return self._object(layout, tool)
        return [self._headed(layout, tool)]

    def _object(self, layout: ObjectCall, tool: Tool) -> Sequence[Parts]:
        arguments, name = (
            self.arguments(tool),
            json.dumps(tool.name, ensure_ascii=False),
        )
        end = self._lark.first_of(self._calls.end)
        if len(name) > LIMIT or not tool.name:
            raise tool.bad(f"a name of a tool has 1 to {LIMIT} characters")
        if layout.name is None:
            return [[Text(f"{{{name}: "), arguments, Text("}"), *end]]
        given = f"{json.dumps(layout.name)}: {name}, {json.dumps(layout.arguments)}: "
        begin, close = Text("{" + given), [Text("}"), *end]
        plain: Parts = [begin, arguments, *close]
        if layout.id is None:
            return [plain]
        id_: Parts = [Text(f'{json.dumps(layout.id)}: "'), self._id, Text('"')]
        return [
            plain,
            [Text("{"), *id_, Text(f", {given}"), arguments, *close],
            [begin, arguments, Text(", "), *id_, *close],
        ]

    def _headed(self, layout: Headed, tool: Tool) -> Parts:
        lark, calls = self._lark, self._calls
        check_name(lark, layout, tool)
        name = Text(tool.name)
        header = [
            *lark.form(
                layout.header[0], {"name": name, "id": self._id, "index": Rule(INDEX)}
            ),
            *lark.first_of(layout.header_end),
        ]
        end = lark.first_of(calls.end)
        if isinstance(layout, TaggedCall):
            return [*header, tagged(lark, layout, tool, end)]
        if isinstance(layout, LiteralCall):
            return [*header, literals(lark, layout, tool), *end]
        return [*header, self.arguments(tool), *end]


def check_name(lark: Lark, layout: Headed, tool: Tool) -> None:
    """Raise BadSchema if a header has no place for the name of *tool*."""
    fields = {"name": tool.name, "id": "a", "index": "0"}
    header = layout.header[0]
    for key, value in fields.items():
        header = header.replace(f"{{{key}}}", value)
    found = matched(tables_of(lark.spec).headers, header)
    ends = [*layout.header_end, *lark.spec.special]
    is_cut = any(end.strip() and end.strip() in tool.name for end in ends)
    if not found or found["name"] != tool.name or len(header) > HEADER_LIMIT or is_cut:
        raise tool.bad(
            f"the format of the model has no place for the name {tool.name!r}"
        )
