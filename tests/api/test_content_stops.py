"""Stops of the content of replies: the engine and the reader find the same, however tokens cut it."""

from __future__ import annotations

import os
from array import array
from functools import partial

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyllama_raw.api.preparation import Choice
from pyllama_raw.core.request import Finished, FinishReason, Request, StopString
from pyllama_raw.core.step import StepPlan, StepResult
from pyllama_raw.prompts.reply import ReplyForm, ReplyStops, stop_strings
from pyllama_raw.replies.parser import (
    Content,
    Part,
    Reasoning,
    ReplyParser,
    calls_of,
    parts_of,
)
from pyllama_raw.replies.spec import ReplySpec
from tests.core.support import answer, make_scheduler, run_until_idle

N_EXAMPLES = int(os.environ.get("PYLLAMA_RAW_TEST_EXAMPLES", "60"))
END = 0
PREFIXES = ("", "<think>\n")
SPEC = ReplySpec.model_validate(
    {
        "reasoning": {},
        "calls": {"open": ["<call>\n", "<call>"], "close": ["</call>"]},
    }
)
CALL = '<call>{"name": "f", "arguments": {"a": "b\\n."}}</call>'
WORDS = [
    *("a", "ab", "b", ".", "\n", " ", "é", "<", "<th", "<ca", "<think>", "</think>"),
    *("<call>", "</call>", '{"name"', CALL, CALL[:30], CALL[:40]),
]
TEXT = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
STOPS = st.lists(
    st.sampled_from(
        ["a", "ab", "b.", ".", "\n", "\n\n", "é", "<", "a<", "name", "b\n"]
    ),
    min_size=1,
    max_size=3,
    unique=True,
)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=10)


def pieces_of(text: str, cuts: list[int]) -> list[bytes]:
    """The bytes of *text* in pieces of these lengths, over and over."""
    data, found, at = text.encode(), list[bytes](), 0
    while at < len(data):
        n = cuts[len(found) % len(cuts)]
        found.append(data[at : at + n])
        at += n
    return found


def ended(text: str, stops: list[str], prefix: str, pieces: list[bytes]):
    """What becomes of *text* that a model writes in *pieces* before it ends its turn."""
    table = [b"", *dict.fromkeys(pieces)]
    tokens = [*(table.index(piece) for piece in pieces), END]
    make = partial(ReplyParser, SPEC, prefix=prefix)
    form, strings, ends = ReplyForm(make, {}, SPEC.delimiters).with_stops(
        stops, frozenset(), table
    )
    assert not strings
    request = Request(
        1,
        array("i", [5, 5]),
        len(tokens),
        find_stop=ReplyStops.finder(form, stop_strings(strings), ends | {END}),
        stop_token_ids=ends | {END},
        reply=form,
    )
    scheduler = make_scheduler(n_slots=1, n_cells=4096, n_ctx_slot=4096)
    scheduler._outputs._pieces = table
    scheduler.add(request, 0.0)
    given_tokens = iter(tokens)

    def execute(plan: StepPlan) -> StepResult:
        return answer(plan, next(given_tokens))

    _, events = run_until_idle(scheduler, execute, max_steps=1000)
    choice = Choice(0, request, 0, table)
    deltas: list[Part] = []
    for event in events:
        if choice.take(event):
            deltas += choice.take_delta().parts
    assert isinstance(events[-1], Finished)
    return choice.result(0.0), deltas


def seen(parts: list[Part]):
    """Texts in stretches, and calls without their ids."""
    stretches: list[list[str]] = []
    last: object = None
    for part in parts:
        kind = type(part)
        if isinstance(part, (Content, Reasoning)):
            if kind is not last:
                stretches.append([kind.__name__, ""])
            stretches[-1][1] += part.text
        elif last is not kind or part.name:
            stretches.append([kind.__name__, ""])
        last = kind
    calls = [(call.name, call.arguments) for call in calls_of(parts)]
    return [tuple(stretch) for stretch in stretches], calls


@settings(max_examples=N_EXAMPLES, deadline=None)
@given(TEXT, STOPS, st.sampled_from(PREFIXES), CUTS)
@example("a<", ["<"], "", [1])
@example("<think>a.</think>b.", ["."], "", [3])
@example("a." + CALL + "b.", ["b."], "", [5, 2])
@example("a.</think>" + CALL, [".", "name"], "<think>\n", [4])
@example("a\n<call>", ["\n"], "", [2])
def test_the_content_ends_before_its_first_stop(text, stops, prefix, cuts):
    """
    Thoughts, calls and the content before it are as without stops, and no content has one.

    The same is true for every way to cut the text into tokens, and for the deltas together.
    """
    whole = parts_of(SPEC, text, prefix=prefix)
    result, deltas = ended(text, stops, prefix, pieces_of(text, cuts))
    other, _ = ended(text, stops, prefix, pieces_of(text, [1]))

    stretches, calls = seen(deltas)
    assert calls == [(call.name, call.arguments) for call in result.tool_calls]
    assert "".join(t for kind, t in stretches if kind == "Content") == result.text
    assert not any(
        stop in t for kind, t in stretches if kind == "Content" for stop in stops
    )
    assert (other.text, other.reasoning) == (result.text, result.reasoning)
    assert other.finish_detail == result.finish_detail
    free, free_calls = seen(whole)
    has_stop = any(stop in t for kind, t in free if kind == "Content" for stop in stops)
    if not has_stop and not isinstance(result.finish_detail, StopString):
        assert (stretches, calls) == (free, free_calls)
    if has_stop:
        assert isinstance(result.finish_detail, StopString)
        assert result.finish_reason is FinishReason.STOP
    if isinstance(result.finish_detail, StopString):
        n = max(len(stretches) - 1, 0)
        assert stretches[:n] == free[:n]
        assert calls == free_calls[: len(calls)]
        if stretches:  # white space before a delimiter may be a part of it
            assert (
                (free[n][1] if len(free) > n else "")
                .rstrip()
                .startswith(stretches[n][1].rstrip())
            )
