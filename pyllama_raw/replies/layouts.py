"""The layout of a call, found in a text that has a known one."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from pyllama_raw.replies.samples import KEYS, Sample, common_end, common_start
from pyllama_raw.replies.spec import (
    CallLayout,
    JsonCall,
    LiteralCall,
    ObjectCall,
    TaggedCall,
)

MAX_WORD = 100  # letters of a word that a name goes on with
_WORD = re.compile(r"[\w.]*\Z")
_BRACKETS = {"(": ")", "{": "}"}
_DECODER = json.JSONDecoder()


class FoundCall(NamedTuple):
    """Place of a call, without what is around it, and its layout."""

    begin: int
    end: int
    layout: CallLayout


def spelled(*delimiters: str) -> tuple[str, ...]:
    """*delimiters* as they are and without white space around them; none of white space."""
    both = [text for one in delimiters for text in (one, one.strip()) if one.strip()]
    return tuple(dict.fromkeys(both))


def call_in(text: str, call: Sample, index: int) -> FoundCall | None:
    """
    The *call*, the one of number *index*, in *text*.

    Returns:
        None if its name or its arguments are not there, or stand as no layout has them.
    """
    key, value = (json.dumps(key) for key in KEYS), (call.text, call.number)
    pairs = (rf"{k}\s*:\s*{json.dumps(v)}" for k, v in zip(key, value, strict=True))
    pattern = r"\{\s*" + r"\s*,\s*".join(pairs) + r"\s*\}"
    name = text.find(call.name)
    if name < 0:
        return None
    if arguments := re.compile(pattern).search(text):
        return _object(text, call, arguments.span()) or _json(
            text, call, index, arguments.span()
        )
    return _by_key(text, call, text.rfind(call.name, 0, text.find(KEYS[0], name)))


def _object(text: str, call: Sample, span: tuple[int, int]) -> FoundCall | None:
    """An object that has the arguments and the name."""
    begin, end = span
    while (begin := text.rfind("{", 0, begin)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return None
        if end < span[1]:
            return None
        if layout := _keys(value, call):
            return FoundCall(begin, end, layout)
    return None


def _keys(value: dict[str, Any], call: Sample) -> ObjectCall | None:
    """The layout of *value*, if it is a call and has no other around it."""
    if value == {call.name: call.arguments}:
        return ObjectCall(name=None)
    name = next((key for key in value if value[key] == call.name), None)
    arguments = next((key for key in value if value[key] == call.arguments), None)
    if name is None or arguments is None:
        return None
    others = [key for key in value if key not in (name, arguments)]
    ids = [key for key in others if value[key] == call.id or key.endswith("id")]
    return ObjectCall(name=name, arguments=arguments, id=ids[0] if ids else None)


def _json(
    text: str, call: Sample, index: int, span: tuple[int, int]
) -> FoundCall | None:
    """A header with the name before the arguments, and perhaps with the id."""
    ends = [text.rfind(word, 0, span[0]) for word in (call.name, call.id)]
    if ends[0] < 0:
        return None
    begin = min(place for place in ends if place >= 0)
    begin -= len(_WORD.findall(text[max(begin - MAX_WORD, 0) : begin])[0])
    last = call.name if ends[0] > ends[1] else call.id
    end = max(ends) + len(last)
    if number := re.match(rf"\W?{index}(?!\d)", text[end : span[0]]):
        end += number.end()
    header = text[begin:end].replace(call.id, "{id}")
    if number:
        header = header[: -len(str(index))] + "{index}"
    header = header.replace(call.name, "{name}")
    layout = JsonCall(
        header=(header,),
        header_end=_header_end(text[end : span[0]]),
        header_is_id="{index}" in header,
    )
    return FoundCall(begin, span[1], layout)


def _header_end(text: str) -> tuple[str, ...]:
    return spelled(text) or ((text,) if text else ())


def _by_key(text: str, call: Sample, name: int) -> FoundCall | None:
    """Keys and values one by one."""
    gaps: list[str] = []
    end = name + len(call.name)
    for word in (KEYS[0], call.text, KEYS[1], str(call.number)):
        place = text.find(word, end)
        if name < 0 or place < 0:
            return None
        gaps.append(text[end:place])
        end = place + len(word)
    rest = text[end:]
    if gaps[0] in _BRACKETS and rest[:1] == _BRACKETS[gaps[0]]:
        literal = _literal(gaps)
        return FoundCall(name, end + 1, literal) if literal else None
    return _tagged(name, end, gaps, rest)


def _literal(gaps: list[str]) -> LiteralCall | None:
    opening, assign, *_ = gaps
    if assign[:1] not in ("=", ":") or not assign[1:]:
        return None
    return LiteralCall.model_validate(
        {
            "header_end": (opening,),
            "close": _BRACKETS[opening],
            "assign": assign[:1],
            "quotes": tuple(dict.fromkeys((assign[1:], '"', "'"))),
        }
    )


def _tagged(begin: int, end: int, gaps: list[str], rest: str) -> FoundCall | None:
    to_key, to_text, between, to_number = gaps
    between = between.replace(KEYS[0], "{key}")
    start = common_end(to_key, between)
    ends = between[: len(between) - len(start)], rest.replace(KEYS[1], "{key}")
    closing = common_start(*ends)
    key, middle = "{key}", to_text
    if to_text != to_number:  # the types of values
        left, right = common_start(to_text, to_number), common_end(to_text, to_number)
        key, middle = "{key}" + left + "{type}", right
    if not (start.strip() and closing.strip() and middle):
        return None
    layout = TaggedCall(
        header_end=_header_end(to_key[: len(to_key) - len(start)]),
        start=spelled(start),
        key=(key,),
        middle=spelled(middle),
        end=spelled(closing),
    )
    return FoundCall(begin, end + len(closing.replace("{key}", KEYS[1])), layout)
