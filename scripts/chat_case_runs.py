"""Runs of chat cases: a reply is fed in pieces, and its parts are held against the case."""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from pyllama_raw.replies.parser import (
    Content,
    Part,
    Reasoning,
    ReplyParser,
    calls_of,
    text_of,
)
from pyllama_raw.replies.spec import ReplySpec
from scripts.chat_case_templates import Template
from scripts.llama_chat_cases import Case, Message

CONTROL = re.compile(  # names of control tokens, as families of models spell them
    r"<\|[^<>|]*\|>|<\uff5c[^<>\uff5c]*\uff5c>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>"
    r"|\[/?[A-Z][A-Z_]*\]"
)
N_DRAWN = 5  # chunkings of each kind
T = TypeVar("T", str, bytes)

Feed = list[tuple[str, bool]]


class Found(NamedTuple):
    """What a reply is made of, as it is compared."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]  # name, arguments, id


def feeds(text: str, spec: ReplySpec, draw: random.Random) -> Iterator[Feed]:
    """*text* in pieces, which are drawn; the first is whole."""
    yield [(text, False)]
    yield [(letter, False) for letter in text]
    for _ in range(N_DRAWN):
        yield [(piece, False) for piece in _drawn(text, draw)]
        decoder = codecs.getincrementaldecoder("utf-8")()
        yield [(decoder.decode(p), False) for p in _drawn(text.encode(), draw)]
    for _ in range(N_DRAWN):
        yield list(_tokens(text, spec, draw))


def _tokens(
    text: str, spec: ReplySpec, draw: random.Random
) -> Iterator[tuple[str, bool]]:
    for piece in re.split(f"({CONTROL.pattern})", text):
        if piece in spec.special:
            yield piece, True
        else:
            yield from ((part, False) for part in _drawn(piece, draw))


def _drawn(text: T, draw: random.Random) -> Iterator[T]:
    place = 0
    while place < len(text):
        end = place + draw.choice((1, 1, 2, 3, 5, 8, 30))
        yield text[place:end]
        place = end


def parsed(spec: ReplySpec, case: Case, prefix: str, feed: Feed) -> Found:
    ids = (f"made{n}" for n in range(10**6))
    parser = ReplyParser(
        spec, tools=case.tools, prefix=prefix, new_id=lambda: next(ids)
    )
    parts: list[Part] = []
    for text, special in feed:
        parts += parser.feed(text, special)
    return found_in([*parts, *parser.finish()])


def found_in(parts: Sequence[Part]) -> Found:
    """*parts* put together."""
    return Found(
        text_of(parts, Content),
        text_of(parts, Reasoning),
        tuple((call.name, call.arguments, call.id) for call in calls_of(parts)),
    )


def expected(case: Case) -> Found:
    """What *case* expects of the reply itself, without what the prompt has begun."""
    start = case.messages[-1] if case.continues else Message()
    message = case.expected
    return Found(
        message.content.removeprefix(start.content),
        message.reasoning_content.removeprefix(start.reasoning_content),
        tuple(message.tool_calls),
    )


def comparable(reading: Found, expected: Found) -> Found:
    """*reading* as llama.cpp's tests compare it: without spaces of JSON and around texts."""
    ids = [id_ for *_, id_ in expected.calls] + [""] * len(reading.calls)
    calls = (
        (name, _normal(arguments), id_ if expected_id else "")
        for (name, arguments, id_), expected_id in zip(reading.calls, ids, strict=False)
    )
    return Found(reading.content.strip(), reading.reasoning.strip(), tuple(calls))


def _normal(arguments: str) -> str:
    """Arguments that are cut off are not compared."""
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:
        return ""


def mistake_in(case: Case, template: Template, spec: ReplySpec, seed: int) -> str:
    """How the parts of *case* differ from what it expects; empty if they do not."""
    if not case.takes_reasoning:
        spec = spec.model_copy(update={"reasoning": None})
    expectation = expected(case)
    bound = spec.bound(lambda text: CONTROL.fullmatch(text) is not None)
    prefix = template.prefix(case, spec)
    first: Found | None = None
    draw = random.Random(f"{seed} {case.name}")  # noqa: S311 - not for secrets
    for feed in feeds(case.text, bound, draw):
        is_bound = any(special for _, special in feed)
        outcome = parsed(bound if is_bound else spec, case, prefix, feed)
        if comparable(outcome, expectation) != comparable(expectation, expectation):
            return f"has {outcome}\n    not {expectation}\n    of {case.text!r}, after {prefix!r}"
        first = first or outcome
        if outcome != first:
            return f"has {outcome} in the pieces {feed}, and {first} as a whole"
    return ""
