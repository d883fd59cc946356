"""Chats on libllama's tokenizer: as ever for normal text, without forged markers."""

import pytest

from pyllama_raw.prompts.chat import NOTHING
from pyllama_raw.prompts.prompt import PromptEncoder

pytestmark = pytest.mark.native

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hello,\n\nhow are <b>you</b>?\n"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "naïve café — 東京 🙂"},
]


@pytest.fixture
def encoder(model):
    encoder = PromptEncoder(model.vocab, model.chat_template(), n_ctx_slot=2**20)
    yield encoder
    encoder.close()


def test_a_normal_chat_is_tokenized_in_one_piece(model, encoder):
    """
    As llama-server does: the text of the template, with its control tokens.
    """
    text = encoder._chat.render(CHAT, NOTHING).text
    expected = model.vocab.tokenize(text, add_special=True, parse_special=True)

    assert encoder.read(CHAT).tokens == expected


def test_no_message_forges_a_control_token(model, encoder):
    """
    Every special token of the vocabulary, whole and in parts, is text in a message.
    """
    special = model.vocab.special_texts
    harmless = encoder.read([{"role": "user", "content": "a"}]).tokens

    tokens = encoder.read([{"role": "user", "content": "".join(special)}]).tokens

    assert any(special.values())
    own = [token for token in harmless if not model.vocab.piece(token)]
    assert [token for token in tokens if not model.vocab.piece(token)] == own


def test_a_long_chat_is_tokenized_as_in_one_piece(model, encoder):
    """
    It is cut in front of control tokens, where libllama cuts it as well.
    """
    chat = [{"role": "user", "content": "Hello, how are you? " * 40}] * 100
    rendered = encoder._chat.render(chat, NOTHING)
    text = rendered.text
    expected = model.vocab.tokenize(text, add_special=True, parse_special=True)

    assert encoder.read(chat).tokens == expected
    assert len(list(encoder._markers.parts(text, rendered.origins))) > 2


def test_special_texts_are_those_the_tokenizer_finds(model):
    """
    Each is one token where special tokens are parsed; control tokens only there.
    """
    vocab = model.vocab
    for text, is_control in vocab.special_texts.items():
        parsed = vocab.tokenize(text, add_special=False, parse_special=True)
        plain = vocab.tokenize(text, add_special=False, parse_special=False)

        assert len(parsed) == 1
        assert (parsed != plain) is is_control
