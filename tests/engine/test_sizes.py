"""Sizes that libllama changes are told to whoever chose them."""

import pytest

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig, SchedulerConfig
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]

CELLS = "libllama rounds cells up to multiples of 256, or of 256 a slot"


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({}, []),
        ({"n_ctx": 256}, []),
        ({"n_ctx": 64}, [f"n_ctx=64 is made 256: {CELLS}"]),
        ({"n_ctx": 300, "kv_unified": False}, [f"n_ctx=300 is made 512: {CELLS}"]),
        (
            {"n_ctx": 512, "n_batch": 1024, "n_ubatch": 1024},
            [
                "n_batch=1024 is made 512: a step has at most n_ctx tokens",
                "n_ubatch=1024 is made 512: a graph has at most the tokens of a step",
            ],
        ),
        (
            {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "n_outputs_max": 100},
            [
                "n_outputs_max=100 is made 64: a step has at least a row for each "
                "sequence, at most n_batch"
            ],
        ),
    ],
)
async def test_each_changed_size_is_one_warning(context, expected, caplog):
    """
    It has both numbers and the reason; defaults that are changed are nobody's choice.
    """
    config = EngineConfig(
        context=ContextConfig(n_threads=1, **context),
        scheduler=SchedulerConfig(n_slots=2),
    )
    async with AsyncEngine.open(tiny_model("llama"), config):
        pass

    told = [r.getMessage() for r in caplog.records if r.name.endswith("engine.layout")]
    assert told == expected
