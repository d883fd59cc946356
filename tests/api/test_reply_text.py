"""The text that a parser of replies is fed with: equal to the text of any other output."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pyllama_raw.core.text import NO_STOPS, Detokenizer, StopStrings
from pyllama_raw.prompts.reply import TextRun, TextRuns

PIECE = st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xa9"]), max_size=3)
TOKENS = st.lists(
    st.tuples(PIECE.map(b"".join), st.just(False)) | st.just((b"<b>", True))
)
STOPS = st.lists(st.text("ab<>é", min_size=1, max_size=4), max_size=3)


def runs_of(text: TextRuns, tokens: list[tuple[bytes, bool]]) -> list[TextRun]:
    runs = [run for token in tokens for run in text.push(*token)]
    return runs + text.flush()


@given(TOKENS, STOPS)
@example([(b"<b>", True), (b"a", False)], ["b"])
@example([(b"\xc3", False), (b"<b>", True)], [])
def test_runs_have_the_text_of_a_detokenizer(tokens, stops):
    """
    Whatever the tokens and the stop strings are, both make the same text of them.
    """
    strings = StopStrings(tuple(stop.encode() for stop in stops))
    plain = Detokenizer(strings)
    expected = "".join([plain.push(piece) for piece, _ in tokens]) + plain.flush()

    runs = runs_of(TextRuns(strings), tokens)

    assert "".join(run.text for run in runs) == expected


def test_special_tokens_stand_alone():
    """
    The spelling of a special token in plain text is no special run; the token itself is one.
    """
    tokens = [
        (b"x<b", False),
        (b">", False),
        (b"<b>", True),
        (b"\xc3", False),
        (b"<b>", True),
    ]

    runs = runs_of(TextRuns(NO_STOPS), tokens)

    assert runs == [
        ("x<b", False), (">", False), ("<b>", True), ("\ufffd", False), ("<b>", True),
    ]  # fmt: skip


def test_a_token_waits_while_it_may_begin_a_stop_string():
    """
    What follows it decides: it is told as a whole, or cut where the stop string begins.
    """
    strings = StopStrings((b"b>a",))

    goes_on, ends = TextRuns(strings), TextRuns(strings)
    waits = goes_on.push(b"<b>", True)
    told = goes_on.push(b"b", False)
    cut = [*ends.push(b"<b>", True), *ends.push(b"ab", False), *ends.push(b"c", False)]

    assert (waits, told) == ([], [("<b>", True)])
    assert cut == [("<", False)]
