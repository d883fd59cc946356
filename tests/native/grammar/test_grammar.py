"""Grammars: tokens follow them, refusals are typed, a dead end fails its row only."""

import re

import numpy as np
import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.engine.sampling import Constraints
from pyllama_raw.errors import SamplingFailed
from pyllama_raw.native.sampler import RowSampler, SamplerChain
from pyllama_raw.native.stages import Draw, TopK
from tests.native.support import run_python
from tests.support.grammars import make_grammar

pytestmark = pytest.mark.native


def write(model, sampler: RowSampler, n_tokens: int, seed: int = 0) -> str:
    """Text of tokens drawn from random logits, until an end."""
    chance, pieces = np.random.default_rng(seed), []
    for _ in range(n_tokens):
        logits = chance.normal(0, 2, model.n_vocab).astype(np.float32)
        token = sampler.sample(logits)
        if token in model.vocab.eog_tokens:
            break
        pieces.append(model.vocab.piece(token))
    return b"".join(pieces).decode()


@pytest.mark.parametrize("greedy", [True, False])
def test_output_follows_the_grammar(model, greedy):
    """
    Random logits give sentences of the grammar, drawn or greedy.
    """
    text = 'root ::= "<" [a-d]{4} ("," [a-d]{4}){3} ">"'
    for seed in range(5):
        grammar = make_grammar(text, model.vocab)
        chain = None
        if not greedy:
            chain = SamplerChain.build((TopK(50), Draw(seed)), model.vocab)
        sampler = RowSampler(chain, grammar=grammar)

        written = write(model, sampler, 40, seed)
        sampler.close()

        assert re.fullmatch(r"<[a-d]{4}(,[a-d]{4}){3}>", written)


def test_each_output_is_at_the_beginning_of_its_grammar(model):
    """
    Requests of one grammar do not disturb each other.
    """
    params = SamplingParams(grammar='root ::= "ab" "c"')
    constraint = Constraints(model.vocab).make(params)
    for _ in range(2):
        sampler = RowSampler(grammar=constraint())
        assert write(model, sampler, 8) == "abc"
        sampler.close()


def test_a_trigger_begins_the_grammar(model):
    """
    Before it anything may come; it is the beginning of the grammar's text.
    """
    vocab = model.vocab
    text = 'root ::= "!" [0-9] [0-9]'
    grammar = make_grammar(text, vocab, grammar_triggers=("!",))
    sampler = RowSampler(grammar=grammar)
    logits = np.zeros(model.n_vocab, np.float32)
    (bang,) = vocab.tokenize("!", add_special=False, parse_special=False)
    (word,) = vocab.tokenize(" free", add_special=False, parse_special=False)

    found = []
    for token in (word, word, bang):
        liked = logits.copy()
        liked[token] = 9
        found.append(sampler.sample(liked))

    assert found == [word, word, bang]
    assert re.fullmatch("[0-9][0-9]", write(model, sampler, 4))


def test_a_trigger_may_lie_within_tokens(model):
    """
    What follows it in its last token is read by the grammar; so is what began before.
    """
    vocab = model.vocab
    text = 'root ::= "lo w" "orld" [0-9] "."'
    grammar = make_grammar(text, vocab, grammar_triggers=("none such", "lo w"))
    sampler = RowSampler(grammar=grammar)
    (hello, world) = vocab.tokenize(
        "hello world", add_special=False, parse_special=False
    )

    for token in (world, hello, world):
        logits = np.zeros(model.n_vocab, np.float32)
        logits[token] = 9
        sampler.sample(logits)

    assert re.fullmatch(r"[0-9]\.", write(model, sampler, 6))


def test_a_dead_end_is_an_error_of_the_row(model):
    """
    If the grammar allows only what is suppressed, no token can be sampled.
    """
    pieces = model.vocab.pieces
    with_z = [token for token in range(model.n_vocab) if pieces[token][:1] == b"z"]
    grammar = make_grammar('root ::= "z"', model.vocab)
    sampler = RowSampler(None, with_z, grammar=grammar)

    with pytest.raises(SamplingFailed):
        write(model, sampler, 30)


def test_hostile_numbers_never_end_the_process(model_path):
    """
    1,500 random parameter sets of odd values, each opened and sampled with: only our errors.
    """
    code = """
import random, sys
from array import array
import numpy as np
from pyllama_raw import PyllamaError, SamplingParams
from pyllama_raw.engine.sampling import Constraints
from pyllama_raw.engine.sampling import open_sampler
from pyllama_raw.native.model import Model

model = Model.load(sys.argv[1], vocab_only=True)
vocab, chance = model.vocab, random.Random(4)
constraints = Constraints(vocab)
numbers = [0, 1, -1, 2, 0.5, 1e-9, 1e-3, 0.999, 1.0, 50, 100, 1000, 2**20, 2**31 - 1,
           2**31, 2**63, 1e30, float("inf"), float("-inf"), float("nan"), None]
texts = ["", "a", "\\0", "\\n", "é" * 30, 'root ::= "a"*', 'root ::= [a-z]+', "((("]
stages = list(SamplingParams().stages) + ["infill"]
special = {
    "stages": lambda: tuple(chance.sample(stages, chance.randint(0, 10))),
    "logit_bias": lambda: {chance.choice([0, 5, 49151]): chance.choice(numbers)},
    "dry_sequence_breakers": lambda: tuple(chance.choices(texts, k=2)),
    "grammar": lambda: chance.choice(texts), "grammar_root": lambda: "root",
    "grammar_triggers": lambda: (chance.choice(texts),), "mirostat": lambda: 1,
    "stop": tuple, "stop_token_ids": tuple, "json_schema": lambda: None,
    "suppress_tokens": lambda: tuple(chance.sample(range(49152), 9)),
    "regex": lambda: None, "lark": lambda: None, "ignore_eos": lambda: True,
    "logprobs_of": lambda: "model",
}
base = np.random.default_rng(0).normal(0, 4, vocab.n_tokens).astype(np.float32)
counts = {"ok": 0, "config": 0, "error": 0}
for n in range(1500):
    names = chance.sample(sorted(SamplingParams.model_fields), chance.randint(1, 4))
    given = {name: special.get(name, lambda: chance.choice(numbers))() for name in names}
    given.setdefault("seed", n)
    try:
        params = SamplingParams(**given)
    except PyllamaError:
        counts["config"] += 1
        continue
    if params.seed is None:
        params = params.model_copy(update={"seed": n})
    try:
        made = constraints.make(params)
        started = None if made is None else made()
        prompt = array("i", chance.choices(range(40000), k=chance.randint(1, 80)))
        sampler = open_sampler(params, vocab, prompt, vocab.eog_tokens, started)
        for _ in range(6):
            token = sampler.sample(base.copy())
            assert 0 <= token < vocab.n_tokens
        sampler.close()
        counts["ok"] += 1
    except PyllamaError:
        counts["error"] += 1
print(counts)
"""
    done = run_python(code, model_path)

    assert done.returncode == 0, done.stderr[-2000:]
    counts = eval(done.stdout)  # noqa: S307 - our own print
    assert counts["ok"] > 100
    assert sum(counts.values()) == 1500
