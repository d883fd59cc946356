"""Lark grammars that would hold up the engine thread: refused, or one row fails."""

import pytest

from pyllama_raw._ffi import llguidance
from pyllama_raw.engine.guidance import Guidance
from pyllama_raw.errors import BadSchema
from pyllama_raw.native.model import Model

pytestmark = pytest.mark.native

OPTIONAL = "start: " + '"a"? ' * 2000
WAYS = "start: r\nr: /[a-z ]/ r r? | /[a-z ]/"


@pytest.fixture(scope="module")
def vocab(model_path):
    with Model.load(model_path, vocab_only=True) as model:
        yield model.vocab


@pytest.fixture(scope="module")
def guidance(vocab):
    return Guidance(vocab)


def test_too_many_ways_are_refused(guidance):
    """
    Before the request is queued, where it is the first token that may be read in them.
    """
    with pytest.raises(BadSchema, match="more than 10000 ways to read an output"):
        guidance.make("lark", OPTIONAL)


def test_a_grammar_that_becomes_too_ambiguous_ends(guidance, vocab):
    """
    Nothing may follow where a mask would take longer; the error says why.
    """
    state = guidance.make("lark", WAYS)()
    (letter,) = vocab.tokenize("a", add_special=False, parse_special=False)
    n_tokens = 0
    while any(state.mask) and n_tokens < 100:
        state.accept(letter)
        state.prepare()
        n_tokens += 1

    assert not any(state.mask)
    assert "Too many items (limit 10000; mask)" in state.error


def test_the_options_lie_where_the_library_reads_them():
    """
    What it sets itself is read back, by its documented values.
    """
    lib = llguidance.load()
    options = llguidance.declared().new("LlgConstraintInit *")
    lib.llg_constraint_init_set_defaults(options, llguidance.declared().NULL)

    assert (
        options.max_items_in_row,
        options.initial_lexer_fuel,
        options.step_lexer_fuel,
        options.step_max_items,
    ) == (2000, 1_000_000, 200_000, 50_000)
