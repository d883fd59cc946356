"""What a caller sees of drafts: fewer steps, counts, and the same output."""

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.api.metrics import EngineMetrics
from pyllama_raw.core.costs import CostHistory
from pyllama_raw.serve.answer import timings
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits

pytestmark = pytest.mark.anyio
PARAMS = SamplingParams(max_tokens=60, logprobs=1)


@pytest.fixture(autouse=True)
def free_rows(monkeypatch):
    """Rows of drafts cost nothing."""
    monkeypatch.setattr(
        CostHistory, "decode_seconds", lambda _, n_most: [1.0] * (n_most + 1)
    )


def repeating(history):
    """A text that says the same four letters again and again."""
    return ord("a") + len(history) % 4


def engine(*, speculates=True):
    limits = fake_limits(n_slots=2, n_ctx_slot=256, n_batch=256, n_outputs=32)
    executor = FakeExecutor(limits, next_token=repeating)
    return fake_engine(executor, speculates=speculates)


async def test_a_stream_has_the_same_deltas_and_scores():
    """
    Tokens of one step may come together; each has its log-probability.
    """
    outputs = []
    for speculates in (False, True):
        async with engine(speculates=speculates) as opened_engine:
            tokens, logprobs, text = [], [], ""
            async with opened_engine.generate("abcd", PARAMS) as generation:
                async for delta in generation:
                    assert len(delta.logprobs) == len(delta.token_ids)
                    tokens += delta.token_ids
                    logprobs += delta.logprobs
                    text += delta.text
            outputs.append((tokens, logprobs, text))

    assert outputs[0] == outputs[1]
    assert len(outputs[0][0]) == 60


async def test_results_statistics_and_metrics_count_drafts():
    """
    As a server of llama.cpp, vLLM and we call them.
    """
    async with engine() as opened_engine:
        metrics = EngineMetrics(opened_engine)
        result = await opened_engine.complete("abcd", PARAMS)
        refusing = await opened_engine.complete("abcd", PARAMS, speculation=False)
        stats, text = opened_engine.stats(), metrics.text()

    usage = result.usage
    assert usage.drafted_tokens >= usage.accepted_tokens > 30
    assert (refusing.usage.drafted_tokens, refusing.text) == (0, result.text)
    both = refusing.usage + usage
    assert both.accepted_tokens == stats.accepted_tokens == usage.accepted_tokens
    assert both.drafted_tokens == stats.drafted_tokens == usage.drafted_tokens
    times = timings(result, 60)
    assert times["draft_n"] == usage.drafted_tokens
    assert times["draft_n_accepted"] == usage.accepted_tokens
    assert "draft_n" not in timings(refusing, 60)
    n_accepted = float(usage.accepted_tokens)
    assert f"vllm:spec_decode_num_accepted_tokens_total {n_accepted}" in text


async def test_outputs_of_one_prompt_and_requests_that_leave():
    """
    Each output has drafts of its own; one that is left in the midst of them ends alone.
    """
    async with engine() as opened_engine:
        results = await opened_engine.complete_n(
            "abcd", PARAMS.model_copy(update={"n": 2})
        )
        async with opened_engine.generate("abcd", PARAMS) as generation:
            async for _ in generation:
                break
        after = await opened_engine.complete("abcd", PARAMS)
        stats = opened_engine.stats()

    assert {result.text for result in results} == {after.text}
    assert all(result.usage.accepted_tokens > 0 for result in results)
    assert (stats.running, stats.failed) == (0, 0)
