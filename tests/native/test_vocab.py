"""Text to tokens and back."""

from array import array

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.errors import InvalidRequest, Unsupported
from pyllama_raw.native.model import Model
from pyllama_raw.native.vocab import Pieces

pytestmark = pytest.mark.native


def tokenize(model: Model, text: str, **options: bool) -> list[int]:
    defaults = {"add_special": False, "parse_special": False}
    return model.vocab.tokenize(text, **(defaults | options)).tolist()


def joined(model: Model, tokens: list[int]) -> str:
    return b"".join(model.vocab.pieces[t] for t in tokens).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The capital of France is",
        " leading and trailing ",
        "line\nline\r\n\ttab",
        "a\0b",
        "naïve café — 東京 🙂 \U0001f468‍\U0001f469‍\U0001f467",
        "<|im_start|>not special<|im_end|>",
        "x" * 5000,
    ],
)
def test_text_survives_the_round_trip(model, text):
    """
    The pieces of the tokens of a text are its bytes, NUL and all.
    """
    assert joined(model, tokenize(model, text)) == text


@settings(max_examples=60)
@given(text=st.text(st.characters(categories=["L", "N", "P", "S", "Z"]), max_size=80))
def test_any_text_survives_the_round_trip(model, text):
    """
    As above, for whatever one writes. (The vocabulary lacks some control characters.)
    """
    assert joined(model, tokenize(model, text)) == text


def test_special_tokens_are_parsed_only_on_demand(model):
    """
    The name of a control token is plain text unless parse_special says otherwise.
    """
    vocab = model.vocab
    name = vocab.piece(vocab.eos, special=True).decode()

    assert tokenize(model, name, parse_special=True) == [vocab.eos]
    assert vocab.eos not in tokenize(model, name)
    assert vocab.piece(vocab.eos) == b""


def test_lone_surrogates_are_refused(model):
    """
    Text that has no UTF-8 is the caller's mistake, named by the character.
    """
    with pytest.raises(InvalidRequest, match=r"'\\ud800'.*surrogates"):
        tokenize(model, "ab\ud800c")


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31 - 1, 2**40])
def test_tokens_out_of_range_are_refused(model, token):
    """
    A token id outside the vocabulary is refused with the allowed range.
    """
    with pytest.raises(InvalidRequest, match=f"token={token}.*n_vocab"):
        model.vocab.piece(token)


def test_special_ids_are_tokens_or_none(model):
    """
    bos, eos and eot are ids of the vocabulary or absent; eos ends generation.
    """
    vocab = model.vocab

    assert vocab.kind == "bpe"
    for token in (vocab.bos, vocab.eos, vocab.eot):
        assert token is None or 0 <= token < vocab.n_tokens
    assert vocab.eos in vocab.eog_tokens
    assert vocab.eog_tokens < frozenset(range(vocab.n_tokens))


def test_pieces_are_those_of_the_tokens(model):
    """
    The table has the piece of every token.
    """
    vocab = model.vocab

    assert [*vocab.pieces] == [vocab.piece(t) for t in range(vocab.n_tokens)]


def test_pieces_are_a_sequence():
    """
    They are counted, sliced and read from the end like a tuple, and end where it does.
    """
    pieces = Pieces(b"abcd", array("q", [1, 1, 4]))

    assert (len(pieces), [*pieces]) == (3, [b"a", b"", b"bcd"])
    assert (pieces[-1], pieces[1:]) == (b"bcd", [b"", b"bcd"])
    for outside in (3, -4):
        with pytest.raises(IndexError):
            pieces[outside]


def test_a_model_may_have_no_vocabulary(tmp_path):
    """
    Without a vocabulary pieces are empty and text cannot be tokenized; ids still work.
    """
    path = tmp_path / "bare.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(100)
    writer.add_tokenizer_model("no_vocab")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with Model.load(path, vocab_only=True) as model:
        vocab = model.vocab

        assert (vocab.kind, vocab.n_tokens, model.n_vocab) == ("none", 100, 100)
        assert (vocab.bos, vocab.eos, vocab.eot) == (None, None, None)
        assert vocab.eog_tokens == frozenset()
        assert vocab.pieces[7] == b""
        with pytest.raises(InvalidRequest, match="token=100"):
            vocab.piece(100)
        with pytest.raises(Unsupported, match="no vocabulary"):
            tokenize(model, "text")
