"""Replies as a family of models writes them, made from its specification."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyllama_raw.replies.parser import CallDelta, Content, Part, Reasoning, ReplyParser
from pyllama_raw.replies.spec import (
    CallsSpec,
    Headed,
    JsonCall,
    LiteralCall,
    ObjectCall,
    ReplySpec,
    TaggedCall,
)

Made = tuple[str, dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "flag": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "more": {
                        "type": "object",
                        "properties": {"deep": {"type": "number"}},
                    },
                },
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "wait", "parameters": {"type": "object"}},
    },
]

SPECIAL = re.compile(
    r"<[|\uff5c][^<>\s]*?>|<[^<>\s]*?[|\uff5c]>|\[/?[A-Z_]+\]|</?(?:think|tool_call)>|\]<\]minimax\[>\["
)


def is_special(text: str) -> bool:
    """Whether a text looks like a special token of some vocabulary."""
    return SPECIAL.fullmatch(text) is not None


def written(
    spec: ReplySpec,
    *,
    reasoning: str = "",
    content: str = "",
    calls: Sequence[Made] = (),
) -> str:
    """The reply that says all this, as *spec* tells to write it."""
    if spec.messages:
        return in_messages(spec, reasoning, content, calls)
    said = content
    if reasoning and spec.reasoning:
        said = f"{spec.reasoning.start[0]}{reasoning}{spec.reasoning.end[0]}{content}"
    return said + (written_calls(spec.calls, calls) if spec.calls and calls else "")


def in_messages(
    spec: ReplySpec, reasoning: str, content: str, calls: Sequence[Made]
) -> str:
    assert spec.messages
    messages = spec.messages
    headers = {rule.kind: rule.written for rule in messages.rules}

    def message(kind: str, text: str, name: str = "") -> str:
        header = headers[kind].replace("{name}", name)
        return (
            messages.start[0]
            + header
            + messages.middle[0]
            + text
            + "".join(messages.end[:1])
        )

    found = (
        [message("reasoning", reasoning)]
        if reasoning and "reasoning" in headers
        else []
    )
    found += [message("content", content)] if content else []
    for name, arguments in calls:
        assert spec.calls
        bare = isinstance(spec.calls.layout, JsonCall)
        text = (
            dumped(arguments)
            if bare
            else written_calls(spec.calls, [(name, arguments)])
        )
        found.append(message("call", text, name))
    return "".join(found)


def written_calls(spec: CallsSpec, calls: Sequence[Made]) -> str:
    layout = spec.layout
    each = [
        "".join(spec.start[:1])
        + written_call(layout, f"{n + 1:09}", *call)
        + "".join(spec.end[:1])
        for n, call in enumerate(calls)
    ]
    array = isinstance(layout, ObjectCall | LiteralCall) and layout.array
    inside = f"[{spec.separator.join(each)}]" if array else spec.separator.join(each)
    return "".join(spec.open[:1]) + inside + "".join(spec.close[:1])


def written_call(
    layout: ObjectCall | Headed, id_: str, name: str, arguments: dict[str, Any]
) -> str:
    if isinstance(layout, ObjectCall):
        if layout.name is None:
            return dumped({name: arguments})
        ids = {layout.id: id_} if layout.id else {}
        return dumped({layout.name: name, layout.arguments: arguments, **ids})
    header = (
        layout.header[0]
        .replace("{name}", name)
        .replace("{id}", id_)
        .replace("{index}", "0")
    )
    header += "".join(layout.header_end[:1])
    if isinstance(layout, TaggedCall):
        return header + "".join(parameter(layout, *pair) for pair in arguments.items())
    if isinstance(layout, LiteralCall):
        pairs = [
            f"{k}{layout.assign}{literal(layout, v)}" for k, v in arguments.items()
        ]
        return header + ",".join(pairs) + layout.close
    return header + dumped(arguments)


def parameter(layout: TaggedCall, key: str, value: Any) -> str:
    kind = "string" if "type=" in layout.key[0] else "true"
    kind = kind if isinstance(value, str) else "false"
    header = layout.key[0].replace("{key}", key).replace("{type}", kind)
    text = value if isinstance(value, str) else dumped(value)
    return (
        layout.start[0]
        + header
        + layout.middle[0]
        + text
        + layout.end[0].replace("{key}", key)
    )


def literal(layout: LiteralCall, value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{literal(layout, k)}:{literal(layout, v)}" for k, v in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(literal(layout, item) for item in value)}]"
    if isinstance(value, str):
        quote = layout.quotes[0]
        return dumped(value) if quote == '"' else quote + value + quote
    return dumped(value)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def parsed(spec: ReplySpec, pieces: Iterable[str], **options: Any) -> list[Part]:
    """The parts of a reply that comes in *pieces*, put together; special tokens are alone."""
    parser = ReplyParser(spec, tools=TOOLS, new_id=counted(), **options)
    parts = [
        part for piece in pieces for part in parser.feed(piece, piece in spec.special)
    ]
    return merged([*parts, *parser.finish()])


def counted() -> Callable[[], str]:
    numbers = iter(range(1_000_000))
    return lambda: f"made {next(numbers)}"


def merged(parts: Iterable[Part]) -> list[Part]:
    """*parts* with neighbours that go on put together."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if (
            isinstance(part, CallDelta)
            and isinstance(last, CallDelta)
            and part.id is None
        ):
            assert part.index == last.index
            assert part.name is None
            text = last.arguments + part.arguments
            found[-1] = CallDelta(last.index, last.id, last.name, text)
        elif isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found


def split(spec: ReplySpec, text: str, cuts: Iterable[int]) -> list[str]:
    """*text* cut at *cuts* and around special tokens."""
    pieces: list[str] = []
    ends = [*sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    at = 0
    for piece, special in spec.pieces(text):
        begin, at = at, at + len(piece)
        inner = (
            [] if special else ends[bisect_right(ends, begin) : bisect_left(ends, at)]
        )
        pieces += [
            text[a:b] for a, b in zip([begin, *inner], [*inner, at], strict=True)
        ]
    return pieces
