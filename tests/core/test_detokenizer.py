"""What the detokenizer promises, however the bytes are cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.text import Detokenizer, StopStrings


def run(
    data: bytes, cuts: list[int], stop: tuple[bytes, ...] = ()
) -> tuple[str, bytes | None]:
    """Push *data* cut at *cuts*; return the whole text and the stop string it met."""
    detokenizer = Detokenizer(StopStrings(stop))
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    texts = [detokenizer.push(data[a:b]) for a, b in pairwise(edges)]
    return "".join(texts) + detokenizer.flush(), detokenizer.stop


def expected(data: bytes, stop: tuple[bytes, ...]) -> tuple[str, bytes | None]:
    """The same by looking at everything at once."""
    for end in range(1, len(data) + 1):
        met = [string for string in stop if data[:end].endswith(string)]
        if met:
            longest = max(met, key=len)
            return data[: end - len(longest)].decode("utf-8", "replace"), longest
    return data.decode("utf-8", "replace"), None


CUTS = st.lists(st.integers(0, 1000), max_size=8)


@given(st.text(), CUTS)
def test_text_does_not_depend_on_the_cuts(text: str, cuts: list[int]) -> None:
    """
    Every split of every UTF-8 string gives the string.
    """
    assert run(text.encode("utf-8", "replace"), cuts) == (
        text.encode("utf-8", "replace").decode(),
        None,
    )


@given(
    st.binary(max_size=12)
    | st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0xFF, 65]), max_size=12).map(
        bytes
    ),
    CUTS,
)
def test_invalid_bytes_are_replaced_as_in_the_whole(
    data: bytes, cuts: list[int]
) -> None:
    """
    Any bytes give what bytes.decode("utf-8", "replace") gives for all of them.
    """
    assert run(data, cuts) == (data.decode("utf-8", "replace"), None)


@given(
    st.lists(st.sampled_from("abé€").map(str.encode), max_size=30).map(b"".join),
    st.lists(
        st.lists(st.sampled_from(["a", "b", "é"]), min_size=1, max_size=4).map(
            lambda parts: "".join(parts).encode()
        )
        | st.sampled_from([b"\xa9", b"\xc3", b"\x82", b"\xa9a", b"\xac\xc3"]),
        max_size=4,
    ).map(tuple),
    CUTS,
)
def test_stop_strings_match_as_in_the_whole(
    data: bytes, stop: tuple[bytes, ...], cuts: list[int]
) -> None:
    """
    Overlapping, nested and mid-character stop strings end the text at the same byte,
    whatever the cuts; the longest of those that end there is told.
    """
    assert run(data, cuts, stop) == expected(data, stop)


@given(
    st.lists(st.sampled_from("abé"), max_size=20).map("".join),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
def test_no_certain_text_is_held_back(text: str, stop: list[str]) -> None:
    """
    After each byte, only an open character or the start of a stop string is missing.
    """
    strings = tuple(string.encode() for string in stop)
    data = text.encode()
    detokenizer = Detokenizer(StopStrings(strings))
    pushed = ""
    for end in range(1, len(data) + 1):
        pushed += detokenizer.push(data[end - 1 : end])
        if detokenizer.stop is not None:
            break
        n_held = max(
            (
                n
                for s in strings
                for n in range(1, len(s))
                if data[:end].endswith(s[:n])
            ),
            default=0,
        )
        certain = data[: end - n_held].decode("utf-8", "ignore")

        assert pushed == certain


def test_open_character_is_held_back() -> None:
    """
    A character split over pieces comes out with its last byte.
    """
    detokenizer = Detokenizer()

    texts = [detokenizer.push(bytes([byte])) for byte in "a€b".encode()]

    assert texts == ["a", "", "", "€", "b"]


def test_flush_gives_what_was_held_back() -> None:
    """
    At the end, an open character is replaced and a begun stop string is text.
    """
    detokenizer = Detokenizer(StopStrings((b"END",)))

    texts = [detokenizer.push(b"a EN"), detokenizer.flush(), detokenizer.flush()]
    texts += [detokenizer.push(b"D\xe2\x82"), detokenizer.flush()]

    assert texts == ["a ", "EN", "", "D", "\ufffd"]


def test_nothing_follows_a_stop_string() -> None:
    """
    The text ends before the stop string; later pieces add nothing.
    """
    detokenizer = Detokenizer(StopStrings((b"\n\n",)))

    texts = [detokenizer.push(piece) for piece in (b"one\n", b"\ntwo", b"three")]
    texts.append(detokenizer.flush())

    assert (texts, detokenizer.stop) == (["one", "", "", ""], b"\n\n")


@pytest.mark.parametrize(
    ("stop", "data", "text"),
    [
        ((b"ab", b"abc"), b"xabc", "x"),  # the prefix is complete first
        ((b"abcd", b"bc"), b"xabcd", "xa"),  # so is the string inside
        ((b"b", b"ab"), b"xab", "x"),  # both end here: the longest
        ((b"aab",), b"aaab", "a"),
        ((b"abac",), b"ababac", "ab"),
        ((b"\xac",), "x€y".encode(), "x\ufffd"),  # inside a character
        (("€".encode(),), "x€y".encode(), "x"),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 3, 100])
def test_first_complete_stop_string_wins(
    stop: tuple[bytes, ...], data: bytes, text: str, n: int
) -> None:
    """
    The stop string that is complete first ends the text, for every piece length.
    """
    assert run(data, list(range(n, len(data), n)), stop)[0] == text


def test_a_table_is_no_larger_than_its_strings() -> None:
    """
    One state and one move a byte, whatever the strings have in common.
    """
    strings = (b"a" * 999, *(b"%c%d" % (97 + i % 26, i) * 4 for i in range(200)))
    table = StopStrings(strings)

    n_states = len(table.moves)
    assert n_states <= 1 + sum(map(len, strings))
    assert sum(map(len, table.moves)) == n_states - 1


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6)))
def test_a_state_is_the_longest_start_of_a_string(text: str, stop: list[str]) -> None:
    """
    After each byte: of all starts of all strings that what was read ends with.
    """
    strings = tuple(string.encode() for string in stop)
    table, state, data = StopStrings(strings), 0, text.encode()
    starts = {s[:n] for s in strings for n in range(len(s) + 1)} | {b""}
    for end in range(1, len(data) + 1):
        state = table.next(state, data[end - 1])
        ends_with = [start for start in starts if data[:end].endswith(start)]
        met = [string for string in strings if data[:end].endswith(string)]

        assert table.depths[state] == max(map(len, ends_with))
        assert table.matches[state] == max(met, key=len, default=b"")
