"""Where drafts come from: what followed the same tokens before, and how often it does."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core import lookup as rules
from pyllama_raw.core.lookup import (
    BORDER,
    FIRST_CHANCES,
    Lookup,
    NamespaceTexts,
    SharedTexts,
)
from pyllama_raw.core.request import Private


def lookup_of(tokens):
    """A lookup that has followed *tokens* from their start."""
    lookup = Lookup(list(FIRST_CHANCES))
    assert lookup.follow(array("i", tokens), list(FIRST_CHANCES))
    return lookup


def drafts_of(lookup, tokens, n_most):
    """Up to *n_most* tokens that are expected behind *tokens*, however unlikely they are."""
    return lookup.draft(array("i", tokens), n_most, 0.0)[0].tolist()


def test_a_draft_is_what_followed_the_same_tokens():
    """
    Of two places with an equal end the longer match counts, not the later one.
    """
    tokens = [9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 6, 7, 9, 1, 2, 3]
    lookup = lookup_of(tokens)

    assert drafts_of(lookup, tokens, 3) == [4, 5, 8]
    assert (lookup.source, lookup.n_matched) == (4, 4)


def test_of_equal_matches_the_latest_counts():
    """
    What was said last is the likeliest to be said again.
    """
    tokens = [1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3]

    assert drafts_of(lookup_of(tokens), tokens, 1) == [5]


def test_a_text_that_repeats_itself_goes_on_so():
    """
    The draft may be longer than what is behind its source.
    """
    tokens = [7, 1, 2, 1, 2, 1, 2]

    assert drafts_of(lookup_of(tokens), tokens, 5) == [1, 2, 1, 2, 1]


def test_there_is_none_without_a_match():
    """
    Two equal tokens are no match, and an empty index has none.
    """
    assert lookup_of([1, 2, 3, 4, 2, 3]).source == 0
    assert lookup_of([1]).source == 0


def test_few_places_are_compared():
    """
    Of a run that stands in many places the latest ones count.
    """
    tokens = [0, 1, 2, 3, *[1, 2, 3, 5] * 9, 0, 1, 2, 3]

    assert drafts_of(lookup_of(tokens), tokens, 1) == [5]


def test_a_long_prompt_is_indexed_in_parts(monkeypatch):
    """
    A step takes in so many tokens at most; until all are there nothing is drafted.
    """
    monkeypatch.setattr(rules, "MAX_INDEXED", 4)
    lookup, tokens = Lookup(list(FIRST_CHANCES)), array("i", [1, 2, 3, 4, 5] * 2)

    shared = list(FIRST_CHANCES)
    assert [lookup.follow(tokens, shared) for _ in range(3)] == [False, False, True]
    assert lookup.source == 5


def test_each_token_tells_whether_it_was_expected():
    """
    A right one makes the match longer; a wrong one ends it, and the chances fall.
    """
    tokens = array("i", [1, 2, 3, 4, 5, 1, 2, 3])
    lookup, shared = Lookup(list(FIRST_CHANCES)), list(FIRST_CHANCES)
    lookup.follow(tokens, shared)

    tokens.append(4)
    lookup.follow(tokens, shared)
    after_right = lookup.chances[0], lookup.source, lookup.n_matched
    tokens.append(9)
    lookup.follow(tokens, shared)
    assert after_right == (pytest.approx(0.405), 4, 4)
    assert lookup.chances[0] == pytest.approx(0.405 * 0.85)
    assert (lookup.source, lookup.n_matched) == (0, 0)
    assert shared[0] == pytest.approx((0.3 + 0.02 * 0.7) * 0.98)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 9))
def test_a_source_is_a_place_that_matches(tokens, n_first):
    """
    Whatever comes in whatever parts: what is before the source is what is at the end.
    """
    lookup, shared = Lookup(list(FIRST_CHANCES)), list(FIRST_CHANCES)
    for n_tokens in [*range(n_first, len(tokens)), len(tokens)]:
        part = array("i", tokens[:n_tokens])
        lookup.follow(part, shared)
        if lookup.source:
            n_matched, source = lookup.n_matched, lookup.source
            assert rules.N_GRAM <= n_matched <= source < n_tokens
            assert part[source - n_matched : source] == part[-n_matched:]
            assert len(drafts_of(lookup, part, 16)) == 16
    assert all(0 <= chance <= 1 for chance in (*lookup.chances, *shared))


@given(st.lists(st.integers(0, 3), min_size=3, max_size=18))
def test_all_at_once_the_longest_match_is_the_source(tokens):
    """
    As a search through all places finds it, where few places have equal ends.
    """
    lookup = lookup_of(tokens)
    n_equal = {
        end: next((n for n in range(end) if tokens[end - 1 - n] != tokens[-1 - n]), end)
        for end in range(1, len(tokens))
    }
    ends = [end for end, n in n_equal.items() if n >= rules.N_GRAM]

    if len(ends) <= rules.MAX_TRIES:
        longest = max(ends, key=lambda end: (n_equal[end], end), default=0)
        assert lookup.source == longest


# -- texts of other requests ---------------------------------------------------------------


def texts_of(*texts):
    """Those of a namespace, in which *texts* have ended."""
    shared = NamespaceTexts()
    for text in texts:
        shared.add(array("i", text))
    return shared


def test_a_text_of_another_request_is_a_source():
    """
    Where five tokens match; the draft ends with that text, and nothing is expected behind it.
    """
    tokens = array("i", [90, 1, 2, 3, 4, 5])
    chances = list(FIRST_CHANCES)
    lookup = Lookup(list(FIRST_CHANCES), texts_of([0, 1, 2, 3, 4, 5, 6, 7]))
    lookup.follow(tokens, chances)

    draft, chances_of_it = lookup.draft(tokens, 9, 0.0)
    assert draft.tolist() == [6, 7, BORDER]
    assert chances_of_it == pytest.approx([FIRST_CHANCES[5] ** n for n in (1, 2, 3)])
    assert len(lookup.draft(tokens, 9, FIRST_CHANCES[5] ** 2)[0]) == 2
    for token in (6, 7):
        tokens.append(token)
        lookup.follow(tokens, chances)
    assert (lookup.source, lookup.n_matched) == (0, 0)
    assert chances[5] == pytest.approx(1 - (1 - FIRST_CHANCES[5]) * 0.98**2)


def test_a_short_match_with_another_text_says_nothing():
    """
    Nor do six, where three stood in the own text; seven say more than these.
    """
    other = [6, 7, 0, 1, 2, 3, 4, 8]
    short = Lookup(list(FIRST_CHANCES), texts_of(other))
    short.follow(array("i", [9, 1, 2, 3, 4]), list(FIRST_CHANCES))
    drafts = []
    for before in ([7], [6, 7]):
        own = Lookup(list(FIRST_CHANCES), texts_of(other))
        tokens = array("i", [2, 3, 4, 9, *before, 0, 1, 2, 3, 4])
        own.follow(tokens, list(FIRST_CHANCES))
        drafts.append(drafts_of(own, tokens, 1))

    none = Lookup(list(FIRST_CHANCES), texts_of(other))
    none.follow(array("i", [30, 31, 32, 33, 34]), list(FIRST_CHANCES))

    assert short.source == none.source == 0
    assert drafts == [[9], [8]]


def test_of_a_namespace_the_latest_texts_are_kept(monkeypatch):
    """
    In a bounded number of tokens, of namespaces and of each text.
    """
    monkeypatch.setattr(rules, "MAX_TEXT", 20)
    monkeypatch.setattr(rules, "MAX_INDEXED", 8)
    monkeypatch.setattr(rules, "MAX_NAMESPACES", 2)
    texts = texts_of(*[range(n, n + 12) for n in range(0, 100, 12)])
    shared = SharedTexts()
    kept = [shared.of(name) for name in ("a", "b", "a", "c")]

    assert [len(text) for text, _ in texts.parts] == [12, 12]
    assert texts.parts[0][0][3:-1].tolist() == [*range(100, 108)]
    assert shared.of("a") is kept[0] is kept[2]
    assert shared.of("b") is not kept[1]
    assert shared.of(Private()) is None


def test_a_request_that_looks_at_what_is_forgotten_looks_away():
    """
    At once, not only where its text is another one.
    """
    shared = SharedTexts()
    shared.of("a").add(array("i", range(20)))
    lookup, tokens = Lookup(list(FIRST_CHANCES), shared.of("a")), array("i", range(8))
    lookup.follow(tokens, list(FIRST_CHANCES))
    before = drafts_of(lookup, tokens, 2)

    shared.clear("a")
    tokens.append(8)
    lookup.follow(tokens, list(FIRST_CHANCES))
    assert before == [8, 9]
    assert (lookup.source, lookup.text) == (0, None)
