"""Text is cut so that the tokenizer finds no marker which a message wrote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.prompts import chat
from pyllama_raw.prompts.chat import Markers
from tests.support.markers import MarkerVocab, texts


def parts(text: str, origins: str, special, template: str = ""):
    return list(Markers(special, template).parts(text, origins))


def test_a_text_without_forgery_is_one_piece():
    """
    What the template wrote is tokenized as ever, with all that stands around it.
    """
    assert parts("<s>a</s>", "tttmtttt", {"<s>": True, "</s>": True}) == [
        ("<s>a</s>", True)
    ]


def test_a_forged_marker_is_cut_inside():
    """
    A character of a message anywhere in a marker is enough.
    """
    special = {"<s>": True}

    assert parts("<s><s>", "tttmmm", special) == [("<s><s", True), (">", True)]
    assert parts("<s>", "ttm", special) == [("<s", True), (">", True)]
    assert parts("<s>", "mtt", special) == [("<", True), ("s>", True)]


def test_spellings_may_be_long_and_many():
    """
    Vocabularies of strangers: no pattern nests as deep as a spelling is long.
    """
    long = f"<{'x' * 20_000}>"
    special = dict.fromkeys([long, *(f"<|{i}|>" for i in range(50_000))], True)

    pieces = parts(f"<|7|>{long}", "t" * 5 + "m" * len(long), special)

    assert pieces == [("<|7|>" + long[:-1], True), (">", True)]


def test_a_marker_of_one_character_is_no_marker_alone():
    """
    It cannot be cut, so the tokenizer does not look for markers in it.
    """
    assert parts("a§b", "mmm", {"§": True}) == [("a", True), ("§", False), ("b", True)]


def test_of_defined_tokens_markers_are_cut():
    """
    A token that is not control is a marker if it looks so, or the template writes it.
    """
    special = dict.fromkeys(["<|x|>", "[A]", "[B]", "<b>", "word", "  "], False)
    text = "<|x|>[A][B]<b>word  "

    found = parts(text, "m" * len(text), special, "[A] word")

    assert [part for part, _ in found] == ["<|x|", ">[A", "][B]<b>word  "]


def test_a_marker_that_the_template_puts_together_is_its_own():
    """
    What is written in two pieces cannot be found in the template's source.
    """
    assert parts("[A][A]", "tttmmm", {"[A]": False}, "[") == [
        ("[A][A", True),
        ("]", True),
    ]


def test_doubt_is_refused():
    """
    A marker of unknown origin is neither the template's nor a message's.
    """
    with pytest.raises(InvalidRequest, match="<s>"):
        parts("<s>", "tdt", {"<s>": True})
    assert parts("<a>", "ddd", {"<s>": True}) == [("<a>", True)]


@given(written=st.lists(st.tuples(texts, st.sampled_from("tm")), max_size=6))
def test_exactly_the_markers_of_the_template_are_left(written):
    """
    No piece holds a marker with a message's character, and none of the others is cut.
    """
    text = "".join(piece for piece, _ in written)
    origins = "".join(origin * len(piece) for piece, origin in written)
    vocab = MarkerVocab()
    pieces = list(Markers(vocab.special_texts, "[INST]").parts(text, origins))

    bounds = [0]
    for piece, _ in pieces:
        bounds.append(bounds[-1] + len(piece))
    assert "".join(piece for piece, _ in pieces) == text
    for spelling in set(vocab.ids) - {"<b>", "  ", "assistant"}:
        for at in range(len(text)):
            if not text.startswith(spelling, at):
                continue
            stop = at + len(spelling)
            is_cut = any(at < bound < stop for bound in bounds)
            is_own = set(origins[at:stop]) == {"t"}
            if len(spelling) == 1 and not is_own:
                assert (spelling, False) in pieces
            else:
                assert is_cut is not is_own


@given(text=texts)
def test_seams_change_no_token(text):
    """
    A long text is cut only where the tokenizer would cut it, too.
    """
    vocab = MarkerVocab()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "PIECE", 1)
        pieces = list(Markers(vocab.special_texts, "").parts(text, "t" * len(text)))

    found = [
        token
        for piece, _ in pieces
        for token in vocab.tokenize(piece, add_special=False, parse_special=True)
    ]
    whole = vocab.tokenize(text, add_special=False, parse_special=True)
    assert found == list(whole)
