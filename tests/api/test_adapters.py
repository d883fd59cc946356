"""Adapters by name: each request gets what it names, whoever comes, goes and is unloaded."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from benchmarks.load.machine import settled_rss_bytes
from pyllama_raw import AsyncEngine, EngineConfig, SamplingParams
from pyllama_raw.errors import (
    AdapterLimit,
    AdapterLoadFailed,
    AdapterNotFound,
    InvalidRequest,
)
from pyllama_raw.options.config import CacheConfig, ContextConfig, SchedulerConfig
from tests.native.support import run_python
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_adapter, tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]

N_LOADS = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "40"))
NAMES = ("lora-a", "lora-b", "control")
SETS = (
    None,
    {"lora-a": 1.0},
    {"lora-a": 0.5},
    {"lora-b": 1.0, "control": -1.5},
    {"lora-a": 1.0, "lora-b": 2.0},
)
PROMPT = "the rest of the story is in the other letters and"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=1024, n_batch=64, n_ubatch=64, n_threads=1),
    scheduler=SchedulerConfig(n_slots=4),
    deterministic=True,
)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
        for name in NAMES:
            await engine.load_adapter(name, tiny_adapter(name))
        yield engine


async def alone(adapters, prompt=PROMPT):
    """The output with *adapters* of an engine that has seen nothing else."""
    async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
        for name in adapters or ():
            await engine.load_adapter(name, tiny_adapter(name))
        return (await engine.complete(prompt, GREEDY, adapters=adapters)).token_ids


async def test_each_output_is_that_of_a_run_with_its_adapters_only(engine):
    """
    Sets that run side by side do not mix, and none takes a prefix of another one.
    """
    wanted = [await alone(chosen) for chosen in SETS]
    results = {}

    async def complete(index):
        chosen = SETS[index % len(SETS)]
        results[index] = await engine.complete(PROMPT, GREEDY, adapters=chosen)

    async with anyio.create_task_group() as group:
        for index in range(3 * len(SETS)):
            group.start_soon(complete, index)

    found = [results[i].token_ids for i in range(3 * len(SETS))]
    assert found == 3 * wanted
    assert len(set(wanted)) == len(SETS)


async def test_no_prefix_is_shared_across_sets(engine):
    """
    The first request of each set computes all of its prompt, the second one takes it over;
    the order of names and a scale of 0 make no other set.
    """
    first = [await engine.complete(PROMPT, GREEDY, adapters=a) for a in SETS]
    same = (*SETS[:3], {"control": -1.5, "lora-b": 1.0}, {**SETS[4], "control": 0})
    second = [await engine.complete(PROMPT, GREEDY, adapters=a) for a in same]

    assert [result.usage.cached_tokens for result in first] == [0] * len(SETS)
    assert min(result.usage.cached_tokens for result in second) > 10
    assert [r.token_ids for r in first] == [r.token_ids for r in second]


async def test_a_file_with_two_names_is_two_adapters(engine):
    """
    Either name gives its output and what the other one has cached; both together are a set of
    their own, twice as strong. One that is unloaded leaves the other.
    """
    wanted = [await alone({"lora-a": scale}) for scale in (1.0, 2.0)]
    await engine.load_adapter("again", tiny_adapter("lora-a"))
    sets = {"lora-a": 1.0}, {"again": 1.0}, {"lora-a": 1.0, "again": 1.0}

    results = [await engine.complete(PROMPT, GREEDY, adapters=a) for a in sets]
    await engine.unload_adapter("lora-a")
    left = await engine.complete(PROMPT, GREEDY, adapters={"again": 1.0})

    found = [result.token_ids for result in [*results, left]]
    assert found == [wanted[0], wanted[0], wanted[1], wanted[0]]
    assert wanted[0] != wanted[1]
    assert [result.usage.cached_tokens > 0 for result in results] == [
        False,
        True,
        False,
    ]


async def test_files_of_the_cache_belong_to_a_set_and_a_salt(tmp_path):
    """
    Another process finds what the same adapters computed, and nothing of other sets; what is
    forgotten of a salt is forgotten with adapters, too.
    """
    cache = CacheConfig(mode="live", directory=tmp_path, max_disk_bytes=2**24)
    config = CONFIG.model_copy(update={"cache": cache, "deterministic": False})
    prompt = PROMPT * 6
    for _ in range(2):
        cached = []
        async with AsyncEngine.open(tiny_model("llama"), config) as engine:
            await engine.load_adapter("other name", tiny_adapter("lora-a"))
            for chosen in ({"other name": 1.0}, None, {"other name": 0.25}):
                result = await engine.complete(
                    prompt, GREEDY, adapters=chosen, cache_salt="salt"
                )
                cached.append(result.usage.cached_tokens > 0)
    async with AsyncEngine.open(tiny_model("llama"), config) as engine:
        await engine.load_adapter("other name", tiny_adapter("lora-a"))
        await engine.clear_cache("salt")
        cleared = await engine.complete(
            prompt, GREEDY, adapters={"other name": 1.0}, cache_salt="salt"
        )

    assert cached == [True, True, True]
    assert cleared.usage.cached_tokens == 0


async def test_what_is_unloaded_goes_on_for_those_that_have_it(engine):
    """
    Queued or running, they get what they named; for others there is no such adapter. The name
    may come back as another file.
    """
    wanted = await alone({"lora-a": 1.0})
    results = []

    async def complete():
        results.append(await engine.complete(PROMPT, GREEDY, adapters={"lora-a": 1.0}))

    async with anyio.create_task_group() as group:
        for _ in range(8):  # twice as many as there are slots
            group.start_soon(complete)
        with anyio.fail_after(LIMIT_S):
            while engine.adapters()[0].n_requests < 8:
                await anyio.lowlevel.checkpoint()
        await engine.unload_adapter("lora-a")
        left = {info.name for info in engine.adapters()}
        with pytest.raises(AdapterNotFound):
            await engine.complete(PROMPT, GREEDY, adapters={"lora-a": 1.0})
        await engine.load_adapter("lora-a", tiny_adapter("lora-b"))
        other = await engine.complete(PROMPT, GREEDY, adapters={"lora-a": 1.0})

    assert left == {"lora-b", "control"}
    assert [result.token_ids for result in results] == 8 * [wanted]
    assert other.token_ids == await alone({"lora-b": 1.0})


def held(engine):
    """C objects that stand on the model, open files, and bytes of memory."""
    model = engine._parts.executor.context.model
    n_files = len(list(Path("/proc/self/fd").iterdir()))
    return (model._resource.n_children, n_files), settled_rss_bytes()


async def test_loads_and_unloads_under_traffic(engine):
    """
    No request fails or gets anything else, and nothing stays behind.
    """
    sets = [{"lora-b": 1.0, "control": 1.0}, None]
    wanted = [await alone(chosen) for chosen in sets]
    found = [], []

    async def stream(index, ended):
        while not ended.is_set():
            result = await engine.complete(PROMPT, GREEDY, adapters=sets[index])
            found[index].append(result.token_ids)

    async def churn(n_loads):
        ended = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(stream, 0, ended)
            group.start_soon(stream, 1, ended)
            for _ in range(n_loads):
                await engine.load_adapter("churn", tiny_adapter("lora-a"))
                await engine.complete(PROMPT, GREEDY, adapters={"churn": 1.0})
                await engine.unload_adapter("churn")
            ended.set()
        await engine.cache_stats()  # the last one is freed
        return held(engine)

    handles, n_bytes = await churn(N_LOADS // 4)
    handles_after, n_bytes_after = await churn(N_LOADS)

    known = engine._parts.executor.adapters._adapters
    assert [set(tokens) for tokens in found] == [{wanted[0]}, {wanted[1]}]
    assert len(known) == len(engine.adapters()) == 3
    assert engine.stats().failed == 0
    assert engine.stats().adapter_switches > N_LOADS
    assert handles_after == handles
    assert n_bytes_after - n_bytes < 2**23


async def test_what_nobody_uses_gives_way_to_the_limit():
    """
    The longest unused one is gone first; what requests use stays, and a load is refused.
    """
    n_bytes = tiny_adapter("lora-a").stat().st_size
    config = CONFIG.model_copy(update={"max_adapter_bytes": 2 * n_bytes})
    async with AsyncEngine.open(tiny_model("llama"), config) as engine:
        for name in ("x", "y", "z"):
            await engine.load_adapter(name, tiny_adapter("lora-a"))
        names = [info.name for info in engine.adapters()]
        both = {"y": 1.0, "z": 1.0}
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        async with engine.generate(PROMPT, long, adapters=both):
            with pytest.raises(AdapterLimit):
                await engine.load_adapter("x", tiny_adapter("lora-a"))

        assert names == ["y", "z"]
        assert {info.name for info in engine.adapters()} == {"y", "z"}


async def test_wrong_arguments_are_refused(engine):
    """
    Unknown names, scales that are no number of use, files that fit no such model.
    """
    for adapters in (
        {"lora-a": float("nan")}, {"lora-a": float("inf")}, {"lora-a": 101},
        {"lora-a": "1"}, {"lora-a": True}, {"": 1.0}, {7: 1.0}, ["lora-a"], "lora-a",
        {f"{n}": 1.0 for n in range(17)},
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            await engine.complete(PROMPT, GREEDY, adapters=adapters)
    with pytest.raises(AdapterNotFound):
        await engine.complete(PROMPT, GREEDY, adapters={"lora-c": 1.0})
    with pytest.raises(AdapterNotFound):
        await engine.unload_adapter("lora-c")
    for path in (tiny_adapter("lora-qwen2"), tiny_model("llama"), "/no/such/file"):
        with pytest.raises(AdapterLoadFailed):
            await engine.load_adapter("new", path)
    for name, path in (
        ("", "file"),
        (5, "file"),
        ("new", 5),
        ("new", ""),
        ("new", "\ud800"),
    ):
        with pytest.raises(InvalidRequest):
            await engine.load_adapter(name, path)

    assert [info.name for info in engine.adapters()] == list(NAMES)
    assert engine._thread.adapters._n_bytes == sum(i.n_bytes for i in engine.adapters())


def test_an_interpreter_ends_well_with_adapters_in_use():
    """
    Whatever is loaded, set, queued or unloaded when a process ends.
    """
    code = """
import sys, anyio
from tests.api.test_adapters import CONFIG, GREEDY, PROMPT, AsyncEngine
from pyllama_raw.errors import PyllamaError
async def main():
    engine = await AsyncEngine.open(sys.argv[1], CONFIG)
    await engine.load_adapter("a", sys.argv[2])
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(complete, engine)
        await anyio.sleep(0.05)
        await engine.unload_adapter("a")
        await engine.aclose()
    try:
        await engine.load_adapter("b", sys.argv[2])
    except PyllamaError as error:
        print(type(error).__name__)
async def complete(engine):
    try:
        await engine.complete(PROMPT, GREEDY, adapters={"a": 1.0})
    except PyllamaError as error:
        pass
anyio.run(main)
"""
    done = run_python(code, tiny_model("llama"), tiny_adapter("lora-a"))

    assert (done.returncode, done.stdout) == (0, "ClosedError\n"), done.stderr[-2000:]
