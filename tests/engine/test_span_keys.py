"""Keys of spans as numbers."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.request import Span
from pyllama_raw.engine.state_files import BadFile, SpanKeys, from_file, to_file


def test_a_key_has_one_number_below_0():
    """
    Numbers are equal only for equal keys.
    """
    keys = SpanKeys()

    numbers = [keys.number(key) for key in (b"a", b"b", b"a")]

    assert numbers == [-1, -2, -1]


def test_a_key_that_was_forgotten_gets_another_number():
    """
    The one that was not asked for longest goes; its number is nobody's again.
    """
    keys = SpanKeys(max_keys=2)

    numbers = [keys.number(key) for key in (b"a", b"b", b"a", b"c", b"b", b"c")]

    assert numbers == [-1, -2, -1, -3, -4, -3]


def test_another_engine_reads_its_own_numbers():
    """
    Tokens with spans are written with keys; text is written as it is.
    """
    ours, theirs = SpanKeys(), SpanKeys()
    theirs.number(b"x" * 32)
    a, b = b"a" * 32, bytes(32)
    spans = (Span(1, 3, 1, key=a), Span(3, 4, 1, key=b), Span(5, 7, 2, key=a))
    tokens = array("i", [7, *[ours.number(a)] * 2, ours.number(b), 8, -1, -1])

    written = to_file(tokens.tobytes(), spans)

    assert from_file(array("i", written), ours) == tokens
    assert from_file(array("i", written), theirs).tolist() == [7, -2, -2, -3, 8, -2, -2]
    assert to_file(tokens[:1].tobytes(), ()) == tokens[:1].tobytes()


@given(st.data())
def test_a_forged_record_is_no_span(data):
    """
    Whatever ints a file has: they are tokens with whole spans, or refused.
    """
    tokens = array("i", [7, -1, -1, 8])
    ints = array("i", to_file(tokens.tobytes(), (Span(1, 3, 1, key=b"a" * 32),)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(ints) - 1))
        ints[place] = data.draw(st.integers(-3, 9) | st.integers(-(2**31), 2**31 - 1))

    try:
        found = from_file(ints, SpanKeys())
    except BadFile:
        return

    assert [token < 0 for token in found] == [
        token == -1 for token in ints[: len(found)]
    ]
