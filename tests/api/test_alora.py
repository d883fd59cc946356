"""aLoRAs: at work from their invocation tokens on, with the caches of those who do without."""

from array import array

import numpy as np
import pytest

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.core.request import Request
from pyllama_raw.core.spans import Span
from pyllama_raw.engine.adapting import Chosen, adapted
from pyllama_raw.engine.span_keys import SpanKeys
from pyllama_raw.errors import InvalidRequest, InvalidSampling
from pyllama_raw.native.adapter import load_adapter
from pyllama_raw.native.model import Model
from pyllama_raw.options.config import CacheConfig
from scripts.tiny_models.adapters import INVOCATION
from tests.api.test_adapters import CONFIG, GREEDY
from tests.native.support import last_logits, make_context, prefill
from tests.tiny import tiny_adapter, tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]

BEFORE = [40 + index % 50 for index in range(30)]
PROMPT = [*BEFORE, *INVOCATION, 60, 61, 62]
ALORA = {"alora": 1.0}
LIKELY = GREEDY.model_copy(update={"logprobs": 20, "max_tokens": 1})


def opened(config=CONFIG):
    return AsyncEngine.open(tiny_model("llama"), config)


async def load(engine):
    for name in ("alora", "lora-b"):
        await engine.load_adapter(name, tiny_adapter(name))
    await engine.load_adapter("other", tiny_adapter("alora"))


@pytest.fixture
async def engine():
    async with opened() as engine:
        await load(engine)
        yield engine


async def alone(prompt, adapters, params=GREEDY):
    """The result of an engine that has seen nothing else."""
    async with opened() as engine:
        await load(engine)
        return await engine.complete(prompt, params, adapters=adapters)


def by_hand(prompt, start, before, behind):
    """The logits of a context that changes its adapters, tiny_adapter names, before *start*."""
    with Model.load(tiny_model("llama")) as model, make_context(model) as context:
        known = {name: load_adapter(model, tiny_adapter(name)) for name in behind}
        tokens = array("i", prompt)
        if start:
            context.set_adapters([(known[name], 1.0) for name in before])
            prefill(context, tokens[:start])
        context.set_adapters([(known[name], 1.0) for name in behind])
        logits = last_logits(context, tokens[start:], pos=start)
        context.set_adapters([])
        for adapter in known.values():
            adapter.close()
    return logits


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        (PROMPT, 30),
        ([*BEFORE, *INVOCATION], 30),
        ([*BEFORE, *INVOCATION, *BEFORE, *INVOCATION, 60], 62),  # the last one counts
        ([50, *INVOCATION, *BEFORE], 1),
        ([*INVOCATION, *BEFORE], 0),
    ],
)
async def test_logits_are_those_of_a_context_that_changes_its_adapters(
    engine, prompt, start
):
    """
    Rows before the invocation are computed without the aLoRA, but with others that are named.
    """
    for before in ((), ("lora-b",)):
        behind = (*before, "alora")
        result = await engine.complete(
            prompt, LIKELY, adapters=dict.fromkeys(behind, 1.0)
        )
        [found] = result.logprobs
        distances = {}
        for at in {0, max(start - 1, 0), start, start + 1}:
            logits = by_hand(prompt, at, before, behind).astype(float)
            wanted = logits - np.log(np.exp(logits).sum())
            distances[at] = max(abs(wanted[token] - p) for token, p in found.top)

        assert min(distances, key=distances.__getitem__) == start
        assert distances[start] < 0.02  # kernels differ


async def test_who_names_an_alora_shares_with_who_does_not(engine):
    """
    All but two tokens before the invocation, in both directions; what comes behind it only
    with who has the same aLoRA at the same scale. Outputs are those of engines with nothing
    cached.
    """
    asked = [None, ALORA, ALORA, {"alora": 0.5}, None, {"lora-b": 1.0}]
    results = [await engine.complete(PROMPT, GREEDY, adapters=each) for each in asked]
    first = await alone(PROMPT, ALORA)
    async with opened() as other:
        await load(other)
        await other.complete(PROMPT, GREEDY, adapters=ALORA)
        base = await other.complete(PROMPT, GREEDY)

    assert [r.usage.cached_tokens for r in results] == [0, 28, 33, 28, 33, 0]
    assert base.usage.cached_tokens == 28
    assert results[1].token_ids == results[2].token_ids == first.token_ids
    assert results[0].token_ids == results[4].token_ids == base.token_ids
    assert len({result.token_ids for result in results}) == 4
    assert results[1].usage.media_tokens == 0


async def test_files_know_where_an_alora_begins(tmp_path):
    """
    Another process finds what was computed with it, and what comes before it for others.
    """
    cache = CacheConfig(mode="live", directory=tmp_path, max_disk_bytes=2**24)
    config = CONFIG.model_copy(update={"cache": cache})
    prompt = [*BEFORE, *BEFORE, *BEFORE, *PROMPT]
    cached = []
    for asked in ((ALORA,), (ALORA,), (None,), ({"alora": 0.5},)):
        async with opened(config) as engine:
            await load(engine)
            for adapters in asked:
                result = await engine.complete(prompt, GREEDY, adapters=adapters)
                cached.append(result.usage.cached_tokens)

    assert cached == [0, 123, 118, 118]


async def test_a_prompt_without_the_invocation_is_computed_without_the_alora(engine):
    """
    It is as if the aLoRA was not named, also for the cache.
    """
    wanted = await engine.complete(BEFORE, GREEDY)
    found = await engine.complete(BEFORE, GREEDY, adapters=ALORA)

    assert found.token_ids == wanted.token_ids
    assert found.usage.cached_tokens == 28
    assert engine._parts.executor.times.adapter_switches == 0


async def test_what_an_alora_cannot_is_refused(engine):
    """
    Two of them, images, and scores of the prompt.
    """
    with pytest.raises(InvalidRequest, match="at most one aLoRA"):
        await engine.complete(PROMPT, GREEDY, adapters={"alora": 1.0, "other": 1.0})
    scored = GREEDY.model_copy(update={"prompt_logprobs": 0})
    with pytest.raises(InvalidSampling, match="aLoRAs"):
        await engine.complete(PROMPT, scored, adapters=ALORA)
    request = Request(1, array("i", PROMPT), 1, spans=(Span(0, 2, 2),))
    with pytest.raises(InvalidRequest, match="images"):
        adapted(request, [Chosen("alora", 1, 1.0, "digest", INVOCATION)], SpanKeys())


async def test_penalties_know_the_tokens_before_an_alora(engine):
    """
    In the cache a number stands for two of them; a token that would be drawn for sure is not.
    """
    results = []
    for penalty in (0.0, 60.0):
        params = SamplingParams(
            temperature=0,
            max_tokens=4,
            logit_bias={BEFORE[-1]: 30.0},
            presence_penalty=penalty,
        )
        results.append(await engine.complete(PROMPT, params, adapters=ALORA))

    assert [BEFORE[-1] in result.token_ids for result in results] == [True, False]
