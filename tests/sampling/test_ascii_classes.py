r"""The classes \d, \w and \s of a pattern: ASCII, wherever they stand."""

import pytest

from pyllama_raw.options.constraints import with_ascii_classes


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d{4}-\d", "[0-9]{4}-[0-9]"),
        (r"a-\d", "a-[0-9]"),
        (r"[\d_]", "[[0-9]_]"),
        (r"[^\d]", "[^[0-9]]"),
        (r"[-\d]", "[-[0-9]]"),
        (r"[]\d]", "[][0-9]]"),
        (r"[^]-\d]", "[^]-[0-9]]"),
        (r"[\d-\w]", "[[0-9]-[0-9A-Za-z_]]"),
        (r"[\w--\d]", "[[0-9A-Za-z_]--[0-9]]"),
        (r"[a-]\d", "[a-][0-9]"),
        (r"\\d", r"\\d"),
        (r"\\\d", r"\\[0-9]"),
        (r"\[\d-\d\]", r"\[[0-9]-[0-9]\]"),
        (r"\D\W\S", r"[^0-9][^0-9A-Za-z_][^\t\n\x0b\f\r ]"),
        (r"\p{Nd}\pL\x{64}", r"\p{Nd}\pL\x{64}"),
        (r"[a-\d]", r"[a-\d]"),
        ("\\", "\\"),
        ("[", "["),
        ("a\n.", "a\n."),
    ],
)
def test_classes_become_sets(pattern, expected):
    """
    Escapes of escapes and classes of Unicode stay; so does the mistake of a range to a class.
    """
    assert with_ascii_classes(pattern) == expected
