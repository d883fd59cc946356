"""Text is a string in all it does, and says of each character who wrote it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.prompts.rendering.environment import (
    Text,
    concat,
    from_message,
    from_template,
    origins,
)
from tests.support.markers import texts

pieces = st.lists(st.tuples(texts, st.booleans()), max_size=5)

METHODS = {
    "lstrip": ([], ["<"]),
    "rstrip": ([], ["<"]),
    "strip": ([], [">s"]),
    "split": ([], ["*"], ["*", 1], [None, 1]),
    "rsplit": ([], ["*"], ["*", 1], [None, 1]),
    "splitlines": ([], [True]),
    "partition": (["*"], ["|"]),
    "rpartition": (["*"], ["|"]),
    "replace": (["*", ""], ["*", "<>"], ["a", "b", 1], ["", "-"]),
    "removeprefix": (["<"],),
    "removesuffix": (["<"],),
    "lower": ([],),
    "upper": ([],),
    "title": ([],),
    "capitalize": ([],),
    "swapcase": ([],),
    "casefold": ([],),
    "join": ([["a", "b"]],),
    "__mul__": ([3],),
    "__rmul__": ([0],),
    "__add__": (["b"],),
    "__radd__": (["b"],),
    "__getitem__": ([slice(1, None)], [slice(None, None, -1)], [slice(-3, -1)]),
}


def make_text(written) -> Text:
    """Pieces of the template and of messages."""
    return concat(
        from_template(text) if is_own else from_message(text)
        for text, is_own in written
    )


@pytest.mark.parametrize("name", METHODS)
@given(written=pieces)
def test_text_does_what_strings_do(name, written):
    """
    Every method gives what it gives for a plain string.
    """
    text = make_text(written)
    plain = "".join(text for text, _ in written)

    for values in METHODS[name]:
        result = getattr(text, name)(*values)
        if name == "__radd__":
            assert result == values[0] + plain
        else:
            assert result == getattr(plain, name)(*values)


LETTERS = st.text("mt \n*", max_size=12).map(
    lambda text: concat(
        (from_template if letter == "t" else from_message)(letter) for letter in text
    )
)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"join", "__add__", "__radd__"}))
@given(text=LETTERS)
def test_characters_keep_their_origin(name, text):
    """
    However a text is taken apart, a "t" is the template's and an "m" a message's.
    """
    for values in METHODS[name]:
        result = getattr(text, name)(*values)
        for part in [result] if isinstance(result, str) else result:
            for letter, origin in zip(part, origins(part), strict=True):
                if letter in "tT":
                    assert origin in "td"
                if letter in "mM":
                    assert origin in "md"


@given(text=LETTERS)
def test_exact_operations_leave_no_doubt(text):
    """
    Slices, pieces, letters of other case and single characters have one writer.
    """
    results = [
        *text, *text.split(), *text.split("*"), *text.splitlines(), text[::-1],
        text.upper(), text.strip(), *text.partition("*"), text * 2,
        text.replace("*", from_message("*")),
    ]  # fmt: skip

    assert {origin for part in results for origin in origins(part)} <= {"m", "t"}


def test_what_is_not_followed_is_in_doubt():
    """
    A plain string, or a character that became two, has no known writer.
    """
    own = from_template("ß")

    assert origins(own + "a" + from_message("m")) == "tdm"
    assert origins(own.upper()) == "dd"
    assert origins(from_message("ß").upper()) == "mm"
    assert type(own.zfill(3)) is str
