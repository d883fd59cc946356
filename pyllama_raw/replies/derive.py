"""
A specification found by rendering a chat template and looking at what it prints.

Messages of unusual words are rendered; what stands around these words is how the model writes,
because a template prints what its model was trained on. The result is tried on those renderings,
and one that does not read them is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from pyllama_raw.replies.layouts import spelled
from pyllama_raw.replies.parser import ReplyParser
from pyllama_raw.replies.parts import CallDelta, Content, Reasoning
from pyllama_raw.replies.samples import (
    CONTENT,
    FIRST,
    REASONING,
    TAG,
    TOOLS,
    Render,
    Sample,
    Samples,
    common_end,
    common_start,
)
from pyllama_raw.replies.sections import Wrapper, section_of, without
from pyllama_raw.replies.spec import ReasoningSpec, ReplySpec

_THINKS = re.compile(r"<([^<>/]{0,20}think[^<>]{0,20})>\s*\Z")


class _Reply(NamedTuple):
    content: str
    reasoning: str
    calls: tuple[Sample, ...]


def derive(render: Render) -> ReplySpec | None:
    """
    The specification of the template that *render* renders with.

    Args:
        render: `render(messages, tools, add_generation_prompt=...)` gives the prompt, or None
            where the template refuses.

    Returns:
        None if nothing is found, or if it does not hold.
    """
    return RenderedReplies(render).derived()


class RenderedReplies:
    """Text that a template prints, and findings in it."""

    def __init__(self, render: Render) -> None:
        self._samples = samples = Samples(render)
        self._answer = Wrapper(*samples.reply(CONTENT).partition(CONTENT)[::2])
        self._reasoning = _reasoning(samples)
        self._section = section_of(samples, self._answer, self._reasoning)

    def derived(self) -> ReplySpec | None:
        """See `derive`."""
        before = self._answer.before
        before = before[len(common_start(before, self._samples.prompt)) :]
        opening = without(self._reasoning, before)
        if TAG.sub("", opening).strip():  # words, which say what a message is
            return None
        closing = self._closing() if opening.strip() else ""
        spec = ReplySpec(
            reasoning=self._reasoning,
            calls=self._section and self._section.spec,
            ignored=spelled(opening, closing),
        )
        has_any = spec.reasoning or spec.calls
        return spec if has_any and self.are_read_by(spec) else None

    def are_read_by(self, spec: ReplySpec) -> bool:
        """Whether *spec* takes the replies that are printed apart as they were put together."""
        return all(
            _reads(spec, self._samples.prompt, text, reply)
            for text, reply in self._replies()
        )

    def _closing(self) -> str:
        """Ends of texts that do not end a turn."""
        after, section = self._answer.after, self._section
        turn_end = common_end(after, section.after) if section else after
        return after[: len(after) - len(turn_end)]

    def _replies(self) -> Iterator[tuple[str, _Reply]]:
        """Texts of replies, and what is in them."""
        said = _until(self._samples.reply(CONTENT), CONTENT)
        if not (self._reasoning and _is_open(said, self._reasoning)):
            yield said, _Reply(CONTENT, "", ())
        thought = self._samples.reply(CONTENT, REASONING)
        if REASONING in thought:
            yield _until(thought, CONTENT), _Reply(CONTENT, REASONING, ())
        if self._section:
            yield self._section.text, _Reply("", "", self._section.calls)


def _reasoning(samples: Samples) -> ReasoningSpec | None:
    """By a message that has some, or by a prompt that begins it."""
    chats = (samples.chat(CONTENT, REASONING), samples.chat("", REASONING, (FIRST,)))
    for text in chats:
        before, found, after = text.partition(REASONING)
        starts = list(TAG.finditer(before))
        end = TAG.search(after)
        if found and starts and end and not after[: end.start()].strip():
            start = before[starts[-1].start() :].strip()
            return ReasoningSpec(start=(start,), end=(end[0],))
    if begun := _THINKS.search(samples.prompt):
        return ReasoningSpec(start=(f"<{begun[1]}>",), end=(f"</{begun[1]}>",))
    return None


def _until(text: str, word: str) -> str:
    before, found, _ = text.partition(word)
    return before + found


def _is_open(text: str, reasoning: ReasoningSpec) -> bool:
    """Whether reasoning begins and does not end, as some templates write all replies."""
    _, begun, rest = text.rpartition(reasoning.start[0])
    return bool(begun) and reasoning.end[0] not in rest


def _reads(spec: ReplySpec, prompt: str, text: str, expected: _Reply) -> bool:
    """Whether *spec* finds what is expected in *text*, which may repeat the *prompt*."""
    prefix = common_start(text, prompt)
    parser = ReplyParser(spec, tools=TOOLS, prefix=prefix)
    parts = [*parser.feed(text[len(prefix) :]), *parser.finish()]
    names = [part.name for part in parts if isinstance(part, CallDelta) and part.name]
    arguments = ["" for _ in names]
    for part in parts:
        if isinstance(part, CallDelta):
            arguments[part.index] += part.arguments
    calls = [(call.name, call.arguments) for call in expected.calls]
    try:
        found = list(zip(names, map(json.loads, arguments), strict=True))
    except (ValueError, RecursionError):
        return False
    content = "".join(part.text for part in parts if isinstance(part, Content))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return (content.strip(), thought.strip(), found) == (
        expected.content,
        expected.reasoning,
        calls,
    )
