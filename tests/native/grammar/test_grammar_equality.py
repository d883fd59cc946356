"""What our grammars allow is what libllama's allow, token by token."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllama_raw.errors import BadGrammar
from pyllama_raw.native.libllama import Handle, ffi, lib
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import Matcher, RowSampler
from tests.native.stage_reference import CANDIDATE
from tests.support.grammars import JSON, make_grammar, make_matcher
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N_TOKENS = 14  # of one walk

GRAMMARS = {
    "json": JSON,
    "any": "root ::= .{1,5} [a-c]",
    "not": "root ::= [^a-z]* [^x]+",
    "characters": 'root ::= ("é" | [à-ü] | [一-龥] | "\\u4e2d" [\\U0001F600-\\U0001F64F])+',
    "tokens": "root ::= [a-f]+ <[122]> | <|im_start|> !<[70]> [a-z]* <|im_end|>",
    "two left out": "root ::= (!<[101]> | !<[102]> | [a-c]) [a-f]* !<[103]>",
    "control tokens as text": 'root ::= "<|im_" [a-z]+ "|>" [^b]*',
    "calls": 'root ::= "(" root? ")" | item\nitem ::= [a-z] item | [a-z]',
    "middle": 'root ::= "a" root "b" | "ab" | ""',
    "ends": 'root ::= ("a" | "ab" | "abc" | "") [ab]?',
    "optional": "root ::= " + '"a"? ' * 12,
    "ambiguous": "root ::= ([a-z]* [a-m ]*)* (root2 | root2)\nroot2 ::= [a-z] | [a-z]",
}


@pytest.fixture(scope="module")
def model():
    with Model.load(tiny_model("llama-bytes")) as loaded:
        yield loaded


class Theirs:
    """libllama's sampler of a grammar."""

    def __init__(self, text: str, model: Model) -> None:
        found = lib.llama_sampler_init_grammar(model.vocab.ptr, text.encode(), b"root")
        if found == ffi.NULL:
            raise BadGrammar("libllama refuses it", None)
        self._handle = Handle(found, lib.llama_sampler_free, parents=[model])
        self._data = np.zeros(model.n_vocab, CANDIDATE)
        self._data["id"] = np.arange(model.n_vocab)

    def allowed(self) -> np.ndarray:
        self._data["logit"] = 0
        view = ffi.new("llama_token_data_array *")
        view.data = ffi.cast("llama_token_data *", self._data.ctypes.data)
        view.size, view.selected = len(self._data), -1
        lib.llama_sampler_apply(self._handle.ptr, view)
        return np.isfinite(self._data["logit"])

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self._handle.ptr, token)


def compare(text: str, model: Model, seed: int) -> None:
    """
    Walk through both with random tokens that they allow, until an end.

    Theirs also allow bytes that are in no UTF-8; ours take a part of a character where any
    token may come.
    """
    ours, theirs = make_grammar(text, model.vocab), Theirs(text, model)
    masks = make_matcher(text, model.vocab)
    sampler, chance = RowSampler(grammar=ours), np.random.default_rng(seed)
    ends, written = sorted(model.vocab.eog_tokens), b""
    for _ in range(N_TOKENS):
        mine, other = allowed(masks, model.n_vocab), theirs.allowed()
        if masks.error:  # too many ways to read what is written, which ends a request
            assert "Too many items" in masks.error
            break
        for token in np.flatnonzero(mine & ~other):
            assert "!<" in text
            assert not is_text(model.vocab.piece(int(token)))
        for token in np.flatnonzero(other & ~mine):
            assert not begins_text(
                written + model.vocab.piece(int(token), special=True)
            )
        mine[ends] = False
        if not (mine & other).any():
            break
        logits = chance.normal(0, 1, model.n_vocab).astype(np.float32)
        logits[~mine | ~other] = -np.inf
        token = sampler.sample(logits)
        masks.accept(token)
        theirs.accept(token)
        written += model.vocab.piece(token, special=True)
    sampler.close()


def allowed(matcher: Matcher, n_tokens: int) -> np.ndarray:
    """By token: whether *matcher* allows it next."""
    matcher.compute_mask()
    bits = np.frombuffer(matcher.mask, np.uint8)
    return np.unpackbits(bits, bitorder="little")[:n_tokens].astype(bool)


def is_text(raw: bytes) -> bool:
    """Whether *raw* is complete UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def begins_text(raw: bytes) -> bool:
    """Whether *raw* can be the beginning of UTF-8."""
    rests = (b"", b"\x80", b"\x80" * 2, b"\x80" * 3, b"\xa0\x80", b"\x90\x80\x80")
    return any(is_text(raw + rest) for rest in rests)


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_tokens_are_allowed(model, name):
    """
    After every token of random walks, also within characters of several bytes.
    """
    for seed in range(6):
        compare(GRAMMARS[name], model, seed)


PARTS = ['"a"', "[b-d]", "(", ")", "|", "*", "+", "?", "{1,3}", "x", ".", " ", "\n"]
PARTS += ['"é"', "[^a]", '"ab"', "{2}", "{0,2}", "{2,}"]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=200,
    deadline=None,  # theirs may take long
)
@given(st.lists(st.sampled_from(PARTS), max_size=12), st.integers(0, 99))
def test_random_grammars_are_the_same(model, parts, seed):
    """
    What we refuse they refuse; what both take allows the same tokens.
    """
    text = "root ::= " + "".join(parts) + '\nx ::= "y" | "z" x'
    try:
        make_grammar(text, model.vocab).close()
    except BadGrammar:
        return
    try:
        Theirs(text, model)
    except BadGrammar:
        return  # empty repetitions of empty items: no trouble for ours

    try:
        compare(text, model, seed)
    except BadGrammar as error:
        # Near the limit of ways to read, which are not counted alike each time.
        if "ways to read" not in str(error):
            raise
