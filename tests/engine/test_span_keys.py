"""Keys of spans as numbers."""

from pyllama_raw.engine.span_keys import SpanKeys


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
