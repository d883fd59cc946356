"""
The specification of a chat template: a bundled one, or one that is found by rendering.

Messages of unusual words are rendered; what stands around these words is how the model writes,
because a template prints what its model was trained on. The result is tried on those renderings,
and one that does not read them is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pyllama_raw.replies.layouts import spelled
from pyllama_raw.replies.parser import parts_of
from pyllama_raw.replies.parts import Content, Reasoning, calls_of, text_of
from pyllama_raw.replies.samples import (
    CONTENT,
    FIRST,
    REASONING,
    TAG,
    TOOLS,
    Render,
    Samples,
    common_end,
    common_start,
)
from pyllama_raw.replies.sections import section_of, without
from pyllama_raw.replies.spec import ReasoningSpec, ReplySpec, bundled

_THINKS = re.compile(r"<([^<>/]{0,20}think[^<>]{0,20})>\s*\Z")
# Content, reasoning, and names of calls with their arguments.
_Reply = tuple[str, str, list[tuple[str, Any]]]


def spec_for(template: str, render: Render) -> ReplySpec | None:
    """
    Specification for replies of the model of *template*.

    It is a bundled one that reads what the template prints. If there is none, it is derived,
    and if that fails, a bundled one by its markers alone.

    Args:
        render: see `derive`.

    Returns:
        None if a reply is only content.
    """
    rendered = RenderedReplies(render)
    fitting = by_markers(template)
    if fitting and rendered.are_read_by(fitting):
        return fitting
    return rendered.derived() or fitting


def by_markers(template: str) -> ReplySpec | None:
    """
    The bundled specification whose markers *template* has.

    Of several the one with the longest markers, because these say most.
    """
    fitting = [
        spec
        for spec in bundled().values()
        if spec.markers and all(marker in template for marker in spec.markers)
    ]
    return max(fitting, key=lambda spec: sum(map(len, spec.markers)), default=None)


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
        self._before, _, self._after = samples.reply(CONTENT).partition(CONTENT)
        self._reasoning = _reasoning(samples)
        self._section = section_of(samples, self._before, self._after, self._reasoning)

    def derived(self) -> ReplySpec | None:
        """See `derive`."""
        before = self._before[len(common_start(self._before, self._samples.prompt)) :]
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
            _read(spec, self._samples.prompt, text) == reply
            for text, reply in self._replies()
        )

    def _closing(self) -> str:
        """Ends of texts that do not end a turn."""
        after, section = self._after, self._section
        turn_end = common_end(after, section.after) if section else after
        return after[: len(after) - len(turn_end)]

    def _replies(self) -> Iterator[tuple[str, _Reply]]:
        """Texts of replies, and what is in them."""
        said = _until(self._samples.reply(CONTENT), CONTENT)
        if not (self._reasoning and _is_open(said, self._reasoning)):
            yield said, (CONTENT, "", [])
        thought = self._samples.reply(CONTENT, REASONING)
        if REASONING in thought:
            yield _until(thought, CONTENT), (CONTENT, REASONING, [])
        if self._section:
            calls = [(call.name, call.arguments) for call in self._section.calls]
            yield self._section.text, ("", "", calls)


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


def _read(spec: ReplySpec, prompt: str, text: str) -> _Reply | None:
    """The reply that *spec* finds in *text*, which may repeat the *prompt*; None: broken calls."""
    prefix = common_start(text, prompt)
    parts = parts_of(spec, text[len(prefix) :], tools=TOOLS, prefix=prefix)
    try:
        calls = [(call.name, json.loads(call.arguments)) for call in calls_of(parts)]
    except (ValueError, RecursionError):
        return None
    content, thought = text_of(parts, Content), text_of(parts, Reasoning)
    return content.strip(), thought.strip(), calls
