"""
Texts of many special tokens, for which libllama takes quadratic time: they are parted.

The tokens of the parts are those of the whole, whatever overlaps and strips blanks.
"""

from random import Random

import pytest

from pyllama_raw.errors import InvalidRequest, Unsupported
from pyllama_raw.native import vocab as vocabs
from pyllama_raw.native.model import Model
from scripts.mutations.gguf_file import read
from scripts.tiny_models import vocab
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

STRIPPING = ["</s>", "<s>", "<unk>", "<mask>"]  # names that libllama looks for
USER_DEFINED = 4  # llama.h: enum llama_token_type
RUNS = ["  ", "   ", "     ", "\n\n", "\n\n\n"]
OVERLAPS = ["abca", "cab", "|><|", "<|im", "üb", " a", "a "]
WORDS = [
    *RUNS,
    *OVERLAPS,
    "<|im_end|>",
    "<|mask|>",
    "<mask>",
    "</s>",
    "<|",
    "|>",
    " ",
    "\n",
    "a",
    "b",
    "東",
    "x",
]


def model_with(folder, names: list[str], **override) -> Model:
    """A tiny model in whose vocabulary *names* are tokens that people may write."""
    file, names = read(tiny_model("llama")), [*STRIPPING, *names]
    end = vocab.N_VOCAB - len(vocab.SPECIAL)
    tokens = file.values[b"tokenizer.ggml.tokens"].data
    tokens[end - len(names) : end] = [name.encode() for name in names]
    kinds = file.values[b"tokenizer.ggml.token_type"].data
    kinds[end - len(names) : end] = [USER_DEFINED] * len(names)
    path = folder / "specials.gguf"
    path.write_bytes(file.encode())
    return Model.load(path, vocab_only=True, kv_overrides=override)


@pytest.mark.parametrize("names", [[], RUNS, OVERLAPS, RUNS + OVERLAPS])
@pytest.mark.parametrize(
    "override",
    [
        {},
        {"general.name": "phi-3"},  # its special tokens take the blanks behind them
        {"tokenizer.ggml.pre": "jina-v2-de"},  # and the mask those in front
        {"tokenizer.ggml.model": "bert"},
        {"tokenizer.ggml.model": "t5"},
        {"tokenizer.ggml.add_eos_token": True},
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
    ],
)
def test_parts_have_the_tokens_of_the_whole(names, override, tmp_path, monkeypatch):
    """
    Wherever a text is parted, with any tokenizer.
    """
    monkeypatch.setattr(vocabs, "SMALL_TEXT", 0)
    monkeypatch.setattr(vocabs, "FEW_MARKERS", 2)
    rng, n_parted = Random(5), 0  # noqa: S311
    with model_with(tmp_path, names, **override) as model:
        for number in range(200):
            text = "".join(rng.choices(WORDS, k=rng.randrange(60)))
            adds, parses = bool(number % 2), bool(number % 4 > 1)
            tokens = model.vocab.tokenize(text, add_special=adds, parse_special=parses)

            assert tokens == model.vocab._whole(text.encode(), (adds, parses), 2**20), (
                text
            )
            n_parted += bool(model.vocab._parts(text.encode(), parse_special=parses))
    assert n_parted > 20


@pytest.mark.parametrize(
    ("unit", "n"), [("<|im_end|>", 20_000), ("<|mask|> \n", 50_000), ("   x", 50_000)]
)
def test_many_special_tokens_are_no_limit(unit, n, tmp_path):
    """
    Tens of thousands of names, also of runs of blanks, of which the longest is one token.
    """
    with model_with(tmp_path, RUNS) as model:
        tokens = model.vocab.tokenize(unit * n, add_special=False, parse_special=True)

        assert (
            b"".join(model.vocab.piece(t, special=True) for t in tokens)
            == (unit * n).encode()
        )


def test_special_tokens_that_cannot_be_parted_have_a_limit(tmp_path):
    """
    Which of them a text has is not certain where their names overlap; the error has the number.
    """
    with (
        model_with(tmp_path, OVERLAPS) as model,
        pytest.raises(InvalidRequest, match=r"19999 special tokens .*at most 16384"),
    ):
        model.vocab.tokenize("abc" * 20_000, add_special=False, parse_special=True)


def test_a_tokenizer_that_would_not_end_is_refused():
    """
    That of RWKV begins anew where a byte begins tokens, is none itself, and no token fits.
    """
    override = {"tokenizer.ggml.model": "rwkv"}
    path = tiny_model("llama")
    with (
        Model.load(path, vocab_only=True, kv_overrides=override) as model,
        pytest.raises(
            Unsupported, match=r"begins tokens of the vocabulary and is none"
        ),
    ):
        model.vocab.tokenize("\u017f", add_special=False, parse_special=False)


def test_a_character_without_a_token_is_refused():
    """
    Where the tokenizer has no token for a byte, the request is at fault, and no other one.
    """
    override = {"tokenizer.ggml.model": "llama"}
    path = tiny_model("llama")
    with (
        Model.load(path, vocab_only=True, kv_overrides=override) as model,
        pytest.raises(InvalidRequest, match="what the tokenizer of this model takes"),
    ):
        model.vocab.tokenize("a\u017f", add_special=False, parse_special=False)
