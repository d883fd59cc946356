"""
The specification of a chat template: a bundled one, or one that is found by rendering.

Messages of unusual words are rendered; what stands around these words is how the model writes,
because a template prints what its model was trained on. The result is tried on those renderings,
and one that does not read them is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from pyllama_raw.replies.parser import Content, Reasoning, calls_of, parts_of, text_of
from pyllama_raw.replies.spec import (
    CallLayout,
    CallsSpec,
    JsonCall,
    LiteralCall,
    ObjectCall,
    ReasoningSpec,
    ReplySpec,
    TaggedCall,
    bundled,
)

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
    # What was written by hand for a family says more than what is derived.
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
        # What stands between the prompt and the text of an answer means nothing.
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
        # Content alone, unless a template opens thoughts in all replies.
        answer = _until(self._samples.reply(CONTENT), CONTENT)
        if not (self._reasoning and _is_open(answer, self._reasoning)):
            yield answer, (CONTENT, "", [])
        # Content behind thoughts, if the template prints these.
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
        # The last tag before the thoughts begins them, and the first one behind them ends them.
        before, thought, after = text.partition(REASONING)
        starts = list(TAG.finditer(before))
        end = TAG.search(after)
        if thought and starts and end and not after[: end.start()].strip():
            start = before[starts[-1].start() :].strip()
            return ReasoningSpec(start=(start,), end=(end[0],))
    # The template prints no thoughts of earlier turns, but its prompt begins some.
    if start_tag := _THINKS.search(samples.prompt):
        return ReasoningSpec(start=(f"<{start_tag[1]}>",), end=(f"</{start_tag[1]}>",))
    return None


def _until(text: str, word: str) -> str:
    before, match, _ = text.partition(word)
    return before + match


def _is_open(text: str, reasoning: ReasoningSpec) -> bool:
    """Whether reasoning begins and does not end, as some templates write all replies."""
    _, start, tail = text.rpartition(reasoning.start[0])
    return bool(start) and reasoning.end[0] not in tail


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


# -- chats of unusual words --------------------------------------------------------------

Render = Callable[..., str | None]
"""
`render(messages, tools, add_generation_prompt=..., enable_thinking=...)`: the prompt, or None if
the template refuses.
"""

MAX_CHARACTERS = 2**16  # of a prompt: more is no message of a few words
CONTENT, REASONING = "contentvalue", "reasonvalue"
KEYS = ("alphakey", "betakey")


class Sample(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    text: str
    number: int

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(zip(KEYS, (self.text, self.number), strict=True))

    @property
    def given(self) -> dict[str, Any]:
        """As a message has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


FIRST = Sample("idaaaaaaa", "firsttool", "firstvalue", 4711)
SECOND = Sample("idbbbbbbb", "secondtool", "secondvalue", 815)

_PARAMETERS = {
    "type": "object",
    "properties": {
        KEYS[0]: {"type": "string", "description": "a"},
        KEYS[1]: {"type": "integer", "description": "b"},
    },
    "required": list(KEYS),
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "a", "parameters": _PARAMETERS},
    }
    for name in (FIRST.name, SECOND.name)
]
USER = {"role": "user", "content": "uservalue"}

TAG = re.compile(r"<[^<>]*>|\[/?[A-Z][A-Z_ ]*\]")
PIECE = re.compile(rf"{TAG.pattern}|\w+|\s|.", re.DOTALL)


def pieces(text: str) -> list[str]:
    """*text* in tags, words and single letters: what two texts share ends between two."""
    return PIECE.findall(text)


def common_start(a: str, b: str) -> str:
    return "".join(_shared(pieces(a), pieces(b)))


def common_end(a: str, b: str) -> str:
    return "".join(_shared(pieces(a)[::-1], pieces(b)[::-1])[::-1])


def _shared(a: list[str], b: list[str]) -> list[str]:
    pairs = zip(a, b, strict=False)
    return [left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


class Samples:
    """
    Asks one template, each question once.

    Attributes:
        prompt: the end of the prompt that asks for a reply.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._chats: dict[tuple[str, str, tuple[Sample, ...]], str] = {}
        prompt = self._rendered([USER], asks=True) or ""
        self._base = self._rendered([USER]) or prompt
        self.prompt = prompt[len(common_start(prompt, self._base)) :]

    def chat(
        self, content: str = "", reasoning: str = "", calls: tuple[Sample, ...] = ()
    ) -> str:
        """A chat that ends with a message of the assistant; empty if it is refused."""
        key = (content, reasoning, calls)
        if key not in self._chats:
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if reasoning:
                message["reasoning_content"] = reasoning
            if calls:
                message["tool_calls"] = [call.given for call in calls]
            self._chats[key] = self._rendered([USER, message]) or ""
        return self._chats[key]

    def reply(
        self, content: str = "", reasoning: str = "", calls: tuple[Sample, ...] = ()
    ) -> str:
        """The last message of such a chat, with all around it."""
        text = self.chat(content, reasoning, calls)
        return text[len(common_start(text, self._base)) :]

    def _rendered(self, chat: list[Any], asks: bool = False) -> str | None:
        text = self._render(
            chat, TOOLS, add_generation_prompt=asks, enable_thinking=True
        )
        return text if text is not None and len(text) <= MAX_CHARACTERS else None


# -- text around calls -------------------------------------------------------------------


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
        places = _found(text, calls)
        if places:
            lead = text[len(common_start(text, before)) : places[0].begin]
            around = _around(text, places, without(reasoning, lead), after)
            end = places[-1].end + len(around.end + around.closing)
            spec = _spec(places[0], around)
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
    places: list[FoundCall] = []
    for index, call in enumerate(calls):
        begin = places[-1].end if places else 0
        place = call_in(text[begin:], call, index)
        if place is None:
            return []
        places.append(FoundCall(begin + place.begin, begin + place.end, place.layout))
    return places


def _around(text: str, places: list[FoundCall], lead: str, turn_end: str) -> _Around:
    tail = text[places[-1].end :].rstrip()
    tail = tail[: len(tail) - len(common_end(tail, turn_end.rstrip()))]
    # One call does not tell what belongs to the section, and what to the call.
    if len(places) == 1:
        return _Around("", lead, tail, "", "")
    # What stands before both calls is the start of a call, what stands behind both its end;
    # more of it belongs to the section.
    between = text[places[0].end : places[1].begin]
    start = common_end(lead, between)
    start = start if start.strip() else ""
    between = between[: len(between) - len(start)]
    end = common_start(between, tail)
    opening = lead[: len(lead) - len(start)]
    tags = list(TAG.finditer(tail, len(end)))[: len(TAG.findall(opening))]
    closing = tail[len(end) : tags[-1].end() if tags else None]
    closing = closing if opening.strip() else ""
    return _Around(opening, start, end, between[len(end) :], closing)


def _spec(place: FoundCall, around: _Around) -> CallsSpec:
    layout = place.layout
    # Brackets around objects are those of an array, and no part of a delimiter.
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


# -- the layout of a call ----------------------------------------------------------------

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
    both = [
        text
        for delimiter in delimiters
        for text in (delimiter, delimiter.strip())
        if delimiter.strip()
    ]
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
    # Arguments that are JSON stand in an object with the name, or behind a header.
    if arguments := re.compile(pattern).search(text):
        return _object(text, call, arguments.span()) or _json(
            text, call, index, arguments.span()
        )
    # Otherwise keys and values stand one by one, as literals or between tags.
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
    keys = [key for key in value if key not in (name, arguments)]
    ids = [key for key in keys if value[key] == call.id or key.endswith("id")]
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
    # The header with fields in the place of the words of this call.
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
    tail = text[end:]
    if gaps[0] in _BRACKETS and tail[:1] == _BRACKETS[gaps[0]]:
        literal = _literal(gaps)
        return FoundCall(name, end + 1, literal) if literal else None
    return _tagged(name, end, gaps, tail)


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


def _tagged(begin: int, end: int, gaps: list[str], tail: str) -> FoundCall | None:
    to_key, to_text, between, to_number = gaps
    between = between.replace(KEYS[0], "{key}")
    start = common_end(to_key, between)
    # What ends both values is the end of a value; what follows the last ends the call.
    ends = between[: len(between) - len(start)], tail.replace(KEYS[1], "{key}")
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
