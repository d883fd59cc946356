"""Text before, between and after calls, found in a text that has known ones."""

from __future__ import annotations

import re
from typing import NamedTuple

from pyllama_raw.replies.layouts import FoundCall, call_in, spelled
from pyllama_raw.replies.samples import (
    FIRST,
    SECOND,
    TAG,
    Sample,
    Samples,
    common_end,
    common_start,
)
from pyllama_raw.replies.spec import CallsSpec, ObjectCall, ReasoningSpec


class Section(NamedTuple):
    """Calls in a reply, and how they are written."""

    spec: CallsSpec
    calls: tuple[Sample, ...]
    text: str  # up to the end of the calls
    after: str


class _Around(NamedTuple):
    """
    Texts around calls; those of the section are empty if each call stands alone.

    The closing has as many tags as the opening, because others end the turn.
    """

    opening: str
    start: str
    end: str
    separator: str
    closing: str


def section_of(
    samples: Samples, before: str, after: str, reasoning: ReasoningSpec | None
) -> Section | None:
    """
    Two calls, or one where the template prints no more.

    Args:
        before: text before the text of a reply that is only text, as *after* is behind it.
    """
    for calls in ((FIRST, SECOND), (FIRST,)):
        text = samples.reply(calls=calls)
        found = _found(text, calls)
        if found:
            lead = text[len(common_start(text, before)) : found[0].begin]
            around = _around(text, found, without(reasoning, lead), after)
            end = found[-1].end + len(around.end + around.closing)
            spec = _spec(found[0], around)
            return Section(spec, calls, text[:end], text[end:])
    return None


def without(reasoning: ReasoningSpec | None, text: str) -> str:
    """*text* without reasoning that is empty, or its end, at its start."""
    if reasoning is None:
        return text
    start, end = re.escape(reasoning.start[0]), re.escape(reasoning.end[0])
    return re.sub(rf"^\s*(?:{start}\s*)?(?:{end}\s*)?", "", text)


def _found(text: str, calls: tuple[Sample, ...]) -> list[FoundCall]:
    """All *calls*, or none."""
    found: list[FoundCall] = []
    for index, call in enumerate(calls):
        begin = found[-1].end if found else 0
        place = call_in(text[begin:], call, index)
        if place is None:
            return []
        found.append(FoundCall(begin + place.begin, begin + place.end, place.layout))
    return found


def _around(text: str, found: list[FoundCall], lead: str, turn_end: str) -> _Around:
    rest = text[found[-1].end :].rstrip()
    rest = rest[: len(rest) - len(common_end(rest, turn_end.rstrip()))]
    if len(found) == 1:
        return _Around("", lead, rest, "", "")
    between = text[found[0].end : found[1].begin]
    start = common_end(lead, between)
    start = start if start.strip() else ""
    between = between[: len(between) - len(start)]
    end = common_start(between, rest)
    opening = lead[: len(lead) - len(start)]
    tags = list(TAG.finditer(rest, len(end)))[: len(TAG.findall(opening))]
    closing = rest[len(end) : tags[-1].end() if tags else None]
    closing = closing if opening.strip() else ""
    return _Around(opening, start, end, between[len(end) :], closing)


def _spec(found: FoundCall, around: _Around) -> CallsSpec:
    layout = found.layout
    if isinstance(layout, ObjectCall):
        outer = around
        around = _Around(
            opening=re.sub(r"\[\s*\Z", "", outer.opening),
            start=re.sub(r"\[\s*\Z", "", outer.start),
            end=re.sub(r"\A\s*\]", "", outer.end),
            separator=outer.separator,
            closing=re.sub(r"\A\s*\]", "", outer.closing),
        )
        is_array = around[:2] != outer[:2]
        layout = layout.model_copy(update={"array": is_array})
    return CallsSpec(
        layout=layout,
        open=spelled(around.opening),
        close=spelled(around.closing),
        start=spelled(around.start),
        end=spelled(around.end),
        separator=around.separator,
        bare=not (around.opening + around.start).strip(),
    )
