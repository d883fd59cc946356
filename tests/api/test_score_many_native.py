"""Many continuations of one prompt, on real models."""

import pytest

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    Engine,
    EngineConfig,
    SchedulerConfig,
)
from tests.support.products import in_turn
from tests.support.tiny import GENERATING, tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]

WORDS = "river stone light garden winter paper engine silver mountain bread window"
TEXT = " ".join([WORDS] * 6) + "\nThe topic is"
LABELS = [f" {first} {second}" for first in "abcd" for second in WORDS.split()[:3]]


def config(n_slots=4, mode="live", *, deterministic=False) -> EngineConfig:
    return EngineConfig(
        context=ContextConfig(n_ctx=n_slots * 512, n_threads=1),
        scheduler=SchedulerConfig(n_slots=n_slots),
        cache=CacheConfig(mode=mode),
        deterministic=deterministic,
    )


def of_tokens(entries):
    return [entry.token_id for entry in entries]


def values(entries):
    return [entry.logprob for entry in entries]


@pytest.mark.parametrize(
    ("name", "mode"),
    in_turn([recipe.name for recipe in GENERATING], ["snapshots", "live", "off"]),
)
async def test_scores_of_many_are_those_of_single_ones(name, mode):
    """
    Whatever the memory of a model is, and whoever else runs: a continuation behind the shared
    prompt has the log-probabilities that it has alone.
    """
    prompt = [32 + (7 * i) % 90 for i in range(70)]
    ends = [[40 + i, 50 + i, 60 + i][: 1 + i % 3] for i in range(9)]
    async with AsyncEngine.open(
        tiny_model(name), config(mode=mode, deterministic=True)
    ) as engine:
        likelihoods = await engine.score_many(prompt, ends, n_top=1)
        again = await engine.score_many(prompt, ends, n_top=1)
        await engine.clear_cache()
        alone = [
            await engine.score([*prompt, *end], n_top=1, cache_salt=str(i))
            for i, end in enumerate(ends)
        ]

    for end, likelihood, repeated, score in zip(
        ends, likelihoods, again, alone, strict=True
    ):
        single = score.logprobs[len(prompt) - 1 :]
        assert of_tokens(likelihood.logprobs) == end == of_tokens(single)
        assert values(likelihood.logprobs) == pytest.approx(values(single), abs=2e-4)
        assert values(repeated.logprobs) == pytest.approx(values(single), abs=2e-4)


async def test_scores_of_many_are_exact_if_deterministic(model_path):
    """
    With deterministic=True a continuation has the bits that it has alone.
    """
    async with AsyncEngine.open(model_path, config(deterministic=True)) as engine:
        likelihoods = await engine.score_many(TEXT, LABELS)
        scores = [
            await engine.score(TEXT + label, cache_salt=label) for label in LABELS
        ]

    for likelihood, score in zip(likelihoods, scores, strict=True):
        n_tokens = len(likelihood.logprobs)
        assert likelihood.logprobs == score.logprobs[-n_tokens:]


def test_a_text_is_computed_once_for_all_labels(model_path):
    """
    Three times as many labels as slots: computed are the text, and a few tokens of each label.
    """
    with Engine.open(model_path, config()) as engine:
        scores = engine.classify(TEXT, LABELS)
        n_text, n_computed = engine.count(TEXT), engine.stats().computed_tokens

    n_labels = sum(len(score.likelihood.token_ids) + 1 for score in scores)
    assert n_text < n_computed <= n_text + n_labels
    assert sum(score.probability for score in scores) == pytest.approx(1)
    assert sorted(score.label for score in scores) == sorted(LABELS)


async def test_a_text_goes_on_as_one_text(model_path):
    """
    Where a continuation makes other tokens of the end of the prompt, these are scored, too.
    """
    async with AsyncEngine.open(model_path, config()) as engine:
        (likelihood,) = await engine.score_many("The capital of France is ", ["Paris"])
        score = await engine.score("The capital of France is Paris")

    assert likelihood.token_ids == score.token_ids[-1:]
    assert likelihood.total == pytest.approx(score.logprobs[-1].logprob, abs=2e-3)
