"""Totals of a run."""

from dataclasses import asdict, replace

import pytest

from pyllama_raw.api.results import Usage
from pyllama_raw.cli.generate import summarize
from pyllama_raw.cli.inputs import Outcome
from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import PyllamaError
from pyllama_raw.testing import fake_engine
from tests.cli.support import make_result

NONE = {"p50": None, "p99": None, "max": None}


@pytest.fixture
async def stats():
    async with fake_engine() as engine:
        return replace(engine.stats(), steps=8, decode_s=1.5, sample_s=0.5)


@pytest.mark.anyio
async def test_totals_and_rates(stats):
    """
    Tokens are summed over all results; rates are over the wall time without loading.
    """
    late = FinishReason.DEADLINE
    outcomes = [
        Outcome(0, make_result(usage=Usage(10, 4, 2), ttft_s=1.0, itl_s=(1, 2, 3))),
        Outcome(1, make_result(usage=Usage(20, 6, 0), ttft_s=3.0, itl_s=(4,))),
        Outcome(
            2, make_result(usage=Usage(5, 0, 0), ttft_s=None, itl_s=(), reason=late)
        ),
        Outcome(3, error=PyllamaError()),
    ]

    totals = summarize(outcomes, load_s=9.0, wall_s=5.0, stats=stats)

    assert totals.pop("engine") == asdict(stats)
    assert totals == {
        "requests": 4,
        "succeeded": 2,
        "failed": 2,
        "load_s": 9.0,
        "wall_s": 5.0,
        "prompt_tokens": 35,
        "completion_tokens": 10,
        "cached_tokens": 2,
        "media_tokens": 0,
        "total_tokens_per_s": 9.0,
        "completion_tokens_per_s": 2.0,
        "ttft_s": {"p50": 1.0, "p99": 3.0, "max": 3.0},
        "itl_s": {"p50": 2, "p99": 4, "max": 4},
        "host_s_per_step": 0.375,
    }


@pytest.mark.anyio
async def test_nothing_done_has_no_latencies(stats):
    """
    Without a result there is nothing to take percentiles of.
    """
    totals = summarize([], load_s=1.0, wall_s=1.0, stats=replace(stats, steps=0))

    assert (totals["ttft_s"], totals["itl_s"], totals["requests"]) == (NONE, NONE, 0)
    assert totals["host_s_per_step"] is None
