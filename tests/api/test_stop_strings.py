"""Stop strings are searched twice: the engine ends a request, its reader cuts the text."""

from __future__ import annotations

import os
from array import array
from functools import partial

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyllama_raw.api.preparation import Choice
from pyllama_raw.core.request import (
    Finished,
    LengthLimit,
    Request,
    StopString,
    StopToken,
)
from pyllama_raw.core.step import StepPlan, StepResult
from pyllama_raw.core.text import StopStrings
from pyllama_raw.prompts.reply import ReplyForm
from pyllama_raw.replies.parser import ReplyParser
from pyllama_raw.replies.spec import ReplySpec
from tests.core.support import answer, make_scheduler, run_until_idle

N_EXAMPLES = int(os.environ.get("PYLLAMA_RAW_TEST_EXAMPLES", "50"))
END = 0  # the stop token; its piece is no text of the output
MAX_TOKENS = 12

PIECE = st.lists(
    st.sampled_from([b"a", b"b", b"\xc3", b"\xa9", b"\n"]), max_size=3
).map(b"".join)
STOP = st.text("abé\n", min_size=1, max_size=5)


def brute_force(tokens: list[int], pieces: list[bytes], stops: tuple[str, ...]):
    """Text, number of tokens and what brought the end, by looking at everything."""
    strings = [stop.encode() for stop in stops]
    data = b""
    for n_tokens, token in enumerate(tokens, start=1):
        if token == END:
            return data.decode("utf-8", "replace"), n_tokens, StopToken(END)
        for byte in pieces[token]:
            data += bytes([byte])
            met = [string for string in strings if data.endswith(string)]
            if met:
                longest = max(met, key=len)
                text = data.removesuffix(longest).decode("utf-8", "replace")
                return text, n_tokens, StopString(longest.decode())
        if n_tokens == MAX_TOKENS:
            break
    return data.decode("utf-8", "replace"), n_tokens, LengthLimit.MAX_TOKENS


@settings(max_examples=N_EXAMPLES, deadline=None)
@given(
    st.lists(PIECE, min_size=1, max_size=5),
    st.lists(st.integers(0, 5), min_size=MAX_TOKENS, max_size=MAX_TOKENS),
    st.lists(STOP, max_size=4).map(tuple),
    st.sampled_from(["text", "text with names", "reply"]),
)
@example([b"aab", b"ab"], [1, 2, 1] * 4, ("abab", "bab", "b"), "text")
@example([b"ab", b"b"], [1, 2, END] * 4, ("abb", "bb", "b"), "text with names")
@example([b"\xc3", b"\xa9a"], [1, 2] * 6, ("a\xe9", "\xe9a"), "text")
@example([b"a", b"ab"], [1, 2] * 6, ("ba",), "reply")
def test_engine_and_reader_stop_at_the_same_place(pieces, tokens, stops, form):
    """
    However strings overlap and tokens cut them, both find what a search of all finds.

    So they do where the last piece is the name of a control token, which a reply knows.
    """
    if form != "text":  # names are whole characters
        pieces = [*pieces[:-1], pieces[-1].decode(errors="ignore").encode()]
    whole = pieces = [b"a", *pieces]
    tokens = [token % len(pieces) for token in tokens]
    names = {} if form == "text" else {len(pieces) - 1: pieces[-1]}
    if names:
        pieces = [*pieces[:-1], b""]
    request = Request(
        1,
        array("i", [5, 5]),
        MAX_TOKENS,
        stop=StopStrings(tuple(stop.encode() for stop in stops)),
        stop_token_ids=frozenset({END}),
        names=names,
        reply=ReplyForm(partial(ReplyParser, ReplySpec()), names)
        if form == "reply"
        else None,
    )
    scheduler = make_scheduler(n_slots=1)
    scheduler._outputs._pieces = pieces
    scheduler.add(request, 0.0)
    given_tokens = iter(tokens)

    def execute(plan: StepPlan) -> StepResult:
        return answer(plan, next(given_tokens))

    _, events = run_until_idle(scheduler, execute)
    choice = Choice(0, request, 0, pieces)
    for event in events:
        choice.take(event)
    result = choice.result(0.0)

    assert isinstance(events[-1], Finished)
    found = result.text, len(result.token_ids), result.finish_detail
    assert found == brute_force(tokens, whole, stops)
