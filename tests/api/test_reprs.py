"""What the public objects print as: short, and what one wants to know of them."""

import anyio
import pytest

from pyllama_raw import FinishReason, SamplingParams
from pyllama_raw.api.results import Result, Score, Timings, Usage
from pyllama_raw.core.request import LengthLimit, TokenLogprobs
from pyllama_raw.testing import fake_engine
from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.anyio

TIMINGS = Timings(None, None, None, None, None, 1.0)


async def test_an_engine_and_its_generations_tell_where_they_stand():
    """
    Model, slots and state; what has ended, and what was read of it.
    """
    params = SamplingParams(max_tokens=3, n=2)
    with anyio.fail_after(LIMIT_S):
        async with fake_engine() as engine:
            generation = engine.generate("a", params)
            shown = [repr(generation)]
            async with generation:
                await generation.collect_all()
                shown += [repr(generation), repr(engine)]
            left = engine.generate("a", params)
            left.cancel()
        shown += [repr(left), repr(engine)]

    assert shown == [
        "<Generation: not begun>",
        "<Generation: 2 of 2 outputs ended, 6 tokens read>",
        "<AsyncEngine of 'model without a name': ready, 4 slots, 0 run, 0 wait>",
        "<Generation: left>",
        "<AsyncEngine of 'model without a name': closed, 4 slots, 0 run, 0 wait>",
    ]


async def test_results_are_short():
    """
    However long an output is, its repr is a line.
    """
    result = Result(
        text="word " * 10_000,
        token_ids=(1,) * 10_000,
        finish_reason=FinishReason.LENGTH,
        usage=Usage(5, 10_000, 0),
        timings=TIMINGS,
        seed=7,
        finish_detail=LengthLimit.MAX_TOKENS,
    )
    score = Score((1, 2), (TokenLogprobs(2, -0.5, ()),))

    assert len(repr(result)) < 250
    assert repr(result).endswith("10000 tokens, length (max_tokens), seed 7>")
    assert repr(score) == "<Score of 2 tokens: -0.50 in all>"
