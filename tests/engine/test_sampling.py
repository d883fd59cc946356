"""Every sampling parameter changes what is drawn; neutral ones add no stage."""

from array import array

import numpy as np
import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.engine.sampling import (
    Constraints,
    Reach,
    history_of,
    open_sampler,
    stages_of,
)
from pyllama_raw.native.model import Model
from pyllama_raw.native.stages import Draw, Dry, Greedy
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

PROMPT = array("i", [5, 9, 5, 9, 7, 5, 9, 7, 5, 9] * 3)
REACH = Reach(1000, 1000)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}

# Read by the scheduler or the API: tests/test_config.py, tests/api.
ELSEWHERE = {
    "from_model",
    "max_tokens",
    "stop",
    "n",
    "stop_token_ids",
    "logprobs",
    "logprobs_of",
    "prompt_logprobs",
    "special",
}
# Need llguidance: tests/engine/test_guidance.py.
GUIDANCE = {"json_schema", "regex", "lark"}

XTC = {"xtc_probability": 1.0, "xtc_threshold": 0.02}
DRY = {"dry_multiplier": 2.0}
DYNAMIC = {"dynatemp_range": 0.9}
REPEAT = {"repeat_penalty": 2.0}
MIROSTAT = {"mirostat": 2, "mirostat_tau": 2.0}
ADAPTIVE = {"adaptive_target": 0.1}
GRAMMAR = {"grammar": 'root ::= [a-fq]+\nother ::= "x"+'}
BREAKING = DRY | {"dry_sequence_breakers": ()}

# What changes a draw: the parameters before, and one more.
CHANGES = {
    "min_tokens": ({}, {"min_tokens": 40}),
    "temperature": ({}, {"temperature": 3.0}),
    "dynatemp_range": ({}, DYNAMIC),
    "dynatemp_exponent": (DYNAMIC, {"dynatemp_exponent": 4.0}),
    "top_k": ({}, {"top_k": 3}),
    "top_p": ({}, {"top_p": 0.3}),
    "min_p": ({}, {"min_p": 0.5}),
    "typical_p": ({}, {"typical_p": 0.2}),
    "top_n_sigma": ({}, {"top_n_sigma": 1.0}),
    "xtc_probability": ({"xtc_threshold": 0.02}, XTC),
    "xtc_threshold": ({"xtc_probability": 1.0}, XTC),
    "min_keep": ({"top_p": 0.05}, {"min_keep": 50}),
    "repeat_penalty": ({}, REPEAT),
    "frequency_penalty": ({}, {"frequency_penalty": 1.0}),
    "presence_penalty": ({}, {"presence_penalty": 2.0}),
    "penalty_last_n": (REPEAT, {"penalty_last_n": 1}),
    "dry_multiplier": ({}, DRY),
    "dry_base": (DRY, {"dry_base": 1.0}),
    "dry_allowed_length": (DRY, {"dry_allowed_length": 20}),
    "dry_last_n": (DRY, {"dry_last_n": 3}),
    "mirostat": ({}, MIROSTAT),
    "mirostat_tau": (MIROSTAT, {"mirostat_tau": 0.5}),
    "mirostat_eta": (MIROSTAT, {"mirostat_eta": 1.0}),
    "adaptive_target": ({}, ADAPTIVE),
    "adaptive_decay": (ADAPTIVE, {"adaptive_decay": 0.0}),
    "stages": ({"top_k": 3}, {"stages": ("top_p",)}),
    "logit_bias": ({}, {"logit_bias": {60: 9.0}}),
    "suppress_tokens": ({}, {"suppress_tokens": tuple(range(50, 90))}),
    "seed": ({}, {"seed": 4}),
    "ignore_eos": ({}, {"ignore_eos": True}),
    "grammar": ({}, GRAMMAR),
    "grammar_root": (GRAMMAR, {"grammar_root": "other"}),
    "grammar_triggers": (GRAMMAR, {"grammar_triggers": ("q",)}),
}


@pytest.fixture(scope="module")
def model():
    with Model.load(tiny_model("llama")) as loaded:
        yield loaded


def draws(model, n_draws=60, **changes) -> list[int]:
    """Tokens for rows of random logits that like to end, one after the other."""
    params = SamplingParams(**(OFF | changes))
    vocab, grammar = model.vocab, None
    if params.grammar is not None:
        grammar = Constraints(vocab).make(params)()
    sampler = open_sampler(params, vocab, PROMPT, vocab.eog_tokens, grammar)
    chance = np.random.default_rng(1)
    found = []
    for _ in range(n_draws):
        logits = chance.normal(0, 1.5, vocab.n_tokens).astype(np.float32)
        logits[sorted(vocab.eog_tokens)] += 4
        if grammar is not None:
            logits[sorted(vocab.eog_tokens)] = -20
        logits[[5, 7, 9]] += 3
        found.append(sampler.sample(logits))
    sampler.close()
    return found


def test_every_parameter_is_shown_somewhere():
    """
    A new parameter needs a line in one of the tables.
    """
    shown = {*CHANGES, *ELSEWHERE, *GUIDANCE, "dry_sequence_breakers"}

    assert set(SamplingParams.model_fields) <= shown


@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_changes_what_is_drawn(model, name):
    """
    The same logits give the same tokens twice, and others with the parameter changed.
    """
    before, change = CHANGES[name]

    assert name in change
    assert draws(model, **before) == draws(model, **before)
    assert draws(model, **before) != draws(model, **(before | change))


def test_breakers_reach_the_stage():
    """
    test_sampling_stages.py shows what they do.
    """
    params = SamplingParams(**(OFF | DRY | {"dry_sequence_breakers": (";",)}))

    assert stages_of(params, REACH) == [Dry(1000, 2.0, 1.75, 2, (";",)), Draw(3)]


NEUTRAL = [
    {},
    {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    {"repeat_penalty": 2.0, "penalty_last_n": 0},
    {"dry_multiplier": 0.0, "dry_base": 4.0},
    {"dry_multiplier": 1.0, "dry_last_n": 0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    {"typical_p": 1.0, "top_n_sigma": 0.0, "dynatemp_range": 0.0},
    {"top_k": 5, "top_p": 0.1, "repeat_penalty": 2.0, "stages": ()},
]


@pytest.mark.parametrize("neutral", NEUTRAL)
def test_neutral_values_add_no_stage(neutral):
    """
    What would change nothing is not in the chain.
    """
    assert stages_of(SamplingParams(**(OFF | neutral)), REACH) == [Draw(3)]


@pytest.mark.parametrize(
    ("changes", "n_stages"),
    [
        ({"temperature": 0}, 0),
        ({"temperature": 1e-4, "top_p": 0.5, "min_p": 0.1}, 0),
        ({"top_k": 1}, 0),
        ({"temperature": 0, "mirostat": 1}, 0),
        ({"temperature": 0, "stages": ("top_p", "temperature", "xtc")} | XTC, 0),
        ({"temperature": 0} | REPEAT, 2),
        ({"temperature": 0} | DRY | REPEAT, 3),
        ({"temperature": 0, "top_k": 5} | XTC, 3),
    ],
)
def test_greedy_keeps_only_what_can_change_it(changes, n_stages):
    """
    Without penalties or stages that may drop the best there is no chain at all.
    """
    stages = stages_of(SamplingParams(**(OFF | changes)), REACH)

    assert len(stages) == n_stages
    assert not stages or stages[-1] == Greedy()


@pytest.mark.parametrize(
    ("n_tokens", "changes", "n_history"),
    [
        (100, REPEAT, 64),
        (100, REPEAT | {"penalty_last_n": 32}, 32),
        (100, {}, 0),
        (100, REPEAT | {"penalty_last_n": 0}, 0),
        (100, REPEAT | {"mirostat": 2}, 0),
        (100, REPEAT | {"stages": ("top_k",)}, 0),
        (100, DRY | {"dry_last_n": 80}, 80),
        (100, DRY | REPEAT | {"dry_last_n": 10}, 64),
        (100, DRY, 100),
    ],
)
def test_penalties_look_back_as_far_as_the_longest_stage(n_tokens, changes, n_history):
    """
    Stages that are not active look back at nothing.
    """
    assert history_of(SamplingParams(**changes), n_tokens) == n_history


def test_the_prompt_counts_for_penalties(model):
    """
    A token of the prompt is penalized from the first output token on.
    """
    params = SamplingParams(temperature=0, presence_penalty=50, seed=0)
    sampler = open_sampler(params, model.vocab, PROMPT, frozenset(), None)
    logits = np.zeros(model.n_vocab, np.float32)
    logits[[5, 20]] = 9, 5

    assert sampler.sample(logits) == 20


def test_min_tokens_holds_back_every_end(model):
    """
    Neither an end-of-generation nor a stop token is drawn before; both may be after.
    """
    ending = model.vocab.eog_tokens | {5}
    params = SamplingParams(temperature=0, min_tokens=3, seed=0)
    sampler = open_sampler(params, model.vocab, PROMPT, ending, None)
    liked = np.zeros(model.n_vocab, np.float32)
    liked[sorted(ending)] = 9

    found = [sampler.sample(liked.copy()) for _ in range(4)]

    assert not ending & set(found[:3])
    assert found[3] in ending
