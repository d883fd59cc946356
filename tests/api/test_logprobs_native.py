"""Log-probabilities, scores and several outputs on real models."""

import anyio
import numpy as np
import pytest

import pyllama_raw
from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from tests.support.products import CLASSES, in_turn
from tests.support.tiny import GENERATING, tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]

N_OUTPUTS = 8


def config(n_slots=2, n_ctx=1024, mode="snapshots", **context) -> EngineConfig:
    options = {"n_ctx": n_ctx, "n_threads": 1, "n_outputs_max": N_OUTPUTS}
    return EngineConfig(
        context=ContextConfig(**(options | context)),
        scheduler=SchedulerConfig(n_slots=n_slots),
        cache=CacheConfig(mode=mode),
        deterministic=True,
    )


def log_softmax(rows: np.ndarray) -> np.ndarray:
    exact = rows.astype(np.float64)
    shifted = exact - exact.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference(path, tokens: tuple[int, ...]) -> np.ndarray:
    """Log-softmax [n_tokens, n_vocab] of one decode of all *tokens*."""
    with Model.load(path) as model:
        fields = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "n_threads": 1}
        exact = {"kv_unified": False, "flash_attn": "off", "n_outputs_max": 512}
        with Context(model, n_seq_max=1, **fields, **exact) as context:
            batch = Batch(512)
            batch.add_scored(tokens, 0, 0)
            context.decode(batch)
            rows = [np.asarray(context.logits(i)) for i in range(len(tokens))]
    return log_softmax(np.array(rows))


@pytest.mark.parametrize("recipe", GENERATING, ids=lambda recipe: recipe.name)
async def test_scores_do_not_depend_on_rows_or_neighbours(recipe):
    """
    A prompt scored a few rows at a time beside others, twice, has the log-probabilities
    of one decode of all of it.
    """
    path = tiny_model(recipe.name)
    prompt = np.random.default_rng(1).integers(32, 126, 61).tolist()
    async with AsyncEngine.open(path, config()) as engine:
        scores = []

        async def score() -> None:
            scores.append(await engine.score(prompt, n_top=2))

        async with anyio.create_task_group() as group:
            group.start_soon(score)
            group.start_soon(score)
            group.start_soon(engine.complete, prompt, SamplingParams(max_tokens=8))

    expected = reference(path, scores[0].token_ids)
    rows, targets = np.arange(60), np.array(scores[0].token_ids[1:])
    for score in scores:
        found = [item.logprob for item in score.logprobs]
        np.testing.assert_allclose(found, expected[rows, targets], atol=2e-4)
        top = [value for item in score.logprobs for _, value in item.top]
        best = -np.sort(-expected[:60], axis=1)[:, :2]
        np.testing.assert_allclose(top, best.ravel(), atol=2e-4)


async def test_greedy_tokens_are_the_most_likely(model_path):
    """
    Of each greedy token the log-probability is the first of its top, and that which the
    whole text is scored with; libllama computes single tokens a little differently.
    """
    options = config(n_outputs_max=64)
    async with AsyncEngine.open(model_path, options) as engine:
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=3)
        async with engine.generate("The capital of France is", params) as generation:
            prompt = generation.prompt_token_ids
            result = await generation.collect()
        score = await engine.score([*prompt, *result.token_ids])

    assert [item.top[0] for item in result.logprobs] == [
        (item.token_id, item.logprob) for item in result.logprobs
    ]
    written = [item.logprob for item in result.logprobs]
    read = [item.logprob for item in score.logprobs[len(prompt) - 1 :]]
    np.testing.assert_allclose(written, read, atol=0.2)


@pytest.mark.parametrize(
    ("recipe", "mode"),
    in_turn(
        GENERATING,
        ("off", "live", "snapshots"),
        always=lambda recipe, _: recipe.name in CLASSES,
    ),
    ids=lambda value: getattr(value, "name", value),
)
async def test_outputs_are_those_of_their_seeds(recipe, mode):
    """
    Output i of n is the output of a request with seed + i; unless the cache is off, the
    prompt is computed once, and for each other output at most two tokens of it, or what
    a window cannot move exactly.
    """
    path = tiny_model(recipe.name)
    prompt = np.random.default_rng(2).integers(32, 126, 64).tolist()
    async with AsyncEngine.open(path, config(n_slots=4, mode=mode)) as engine:
        params = SamplingParams(max_tokens=6, n=4, seed=11, ignore_eos=True)
        results = await engine.complete_n(prompt, params)
        n_computed = engine.stats().computed_tokens
        singles = [
            await engine.complete(prompt, params.model_copy(update={"n": 1, "seed": s}))
            for s in range(11, 15)
        ]

    assert [r.token_ids for r in results] == [r.token_ids for r in singles]
    assert len({r.token_ids for r in results}) > 1
    n_prompts = 4 * 64 if mode == "off" else 64 + 3 * (recipe.n_swa or 2)
    assert n_computed <= n_prompts + 4 * 5


def test_a_text_is_scored_in_one_call(model_path):
    """
    score() opens the model and finds words in order likelier than out of order.
    """
    likely = pyllama_raw.score("The cat sat on the mat.", model=model_path)
    strange = pyllama_raw.score("mat the. on The sat cat", 1, model=model_path)

    assert likely.perplexity < strange.perplexity
    assert all(len(item.top) == 1 for item in strange.logprobs)
