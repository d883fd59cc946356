"""How the library and a model are loaded."""

import subprocess
import sys
from typing import get_args

import pytest

from pyllama_raw import AsyncEngine, EngineConfig, SamplingParams
from pyllama_raw.engine import executor
from pyllama_raw.native import LoadMode
from tests.support.native_loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

GREEDY = SamplingParams(max_tokens=4, temperature=0)
RACE = """
from threading import Barrier, Thread
from pyllama_raw import _ffi
from pyllama_raw.native import libllama
calls, barrier, load = [], Barrier(8), _ffi.load
def counted():
    calls.append(1)
    return load()
_ffi.load = counted
seen = []
def race():
    barrier.wait()
    seen.append(libllama.load())
threads = [Thread(target=race) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(calls), len(set(map(id, seen))))
"""


def test_threads_that_race_load_the_library_once():
    """
    Eight threads get the same library, which is initialised by one of them.
    """
    run = subprocess.run(
        [sys.executable, "-c", RACE], capture_output=True, text=True, check=True
    )

    assert run.stdout.split() == ["1", "1"]


@pytest.mark.anyio
async def test_every_load_mode_gives_the_same_tokens():
    """
    The way that weights come into memory changes no output.
    """
    outputs = {}
    for mode in get_args(LoadMode):
        config = EngineConfig(model={"load_mode": mode}, context={"n_threads": 1})
        async with AsyncEngine.open(tiny_model("llama"), config) as engine:
            outputs[mode] = (await engine.complete("hello", GREEDY)).token_ids

    assert len(outputs) == 6
    assert set(outputs.values()) == {outputs["auto"]}


@pytest.mark.anyio
async def test_an_engine_may_be_warmed_up_before_it_is_open(monkeypatch):
    """
    A step of all slots was computed once, and nothing of it is counted or kept.
    """
    contexts = []
    warm_up = executor.warm_up

    def counted(context):
        contexts.append(context)
        return warm_up(context)

    monkeypatch.setattr(executor, "warm_up", counted)
    config = EngineConfig(warm_up=True, context={"n_threads": 1})
    async with AsyncEngine.open(tiny_model("llama"), config) as engine:
        stats, cache = engine.stats(), await engine.cache_stats()
        result = await engine.complete("hello", GREEDY)

    assert len(contexts) == 1
    assert (stats.steps, stats.n_cells_used, cache.n_bytes) == (0, 0, 0)
    assert result.usage.completion_tokens == 4
