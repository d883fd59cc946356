"""
Randomness belongs to the request: same seed, parameters and prompt, same tokens.

In deterministic mode, whatever runs beside it and whatever happens on the way. The
reference is each request alone in an engine with one slot and no cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import anyio
import pytest

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.native.context import StepOutcome
from scripts.tiny_models.vocab import END_OF_GENERATION
from tests.support.tiny import tiny_model

pytestmark = [
    pytest.mark.native,
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
]

N_TOKENS = 32
N_SLOTS = 4
WORDS = 'root ::= ([a-z]{2,5} " ")*'

STAGES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "temperature": {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "top_k": 0},
    "all of the prompt": {"presence_penalty": 0.9, "penalty_last_n": None},
    "dry": {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_last_n": 20},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "typical_p": 0.9},
    "sigma": {"top_n_sigma": 1.5, "dynatemp_range": 0.4},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_eta": 0.3},
    "adaptive_p": {"adaptive_target": 0.2},
    "bias": {"logit_bias": {101: 2.0}, "suppress_tokens": (97,), "min_tokens": 20},
    "greedy": {"temperature": 0.0, "repeat_penalty": 1.2},
    "grammar": {"grammar": WORDS, "logit_bias": dict.fromkeys(END_OF_GENERATION, -9.0)},
    "grammar, dry": {"grammar": WORDS, "dry_multiplier": 1.0},
    "grammar, mirostat": {"grammar": WORDS, "mirostat": 2},
    "lazy grammar": {"grammar": 'root ::= "e" [^a]*', "grammar_triggers": ("e",)},
}
if find_spec("llguidance"):
    STAGES["pattern"] = {"regex": "([a-z]{2,5} )*"}

PROMPTS = {
    name: f"A prompt of some length that speaks of {name}, again and again, of {name}."
    for name in STAGES
}


def make_config(**changes: Any) -> EngineConfig:
    options: dict[str, Any] = {"n_slots": N_SLOTS, "mode": "snapshots"} | changes
    return EngineConfig(
        context=ContextConfig(n_ctx=256 * options["n_slots"], n_threads=1),
        scheduler=SchedulerConfig(n_slots=options["n_slots"], token_budget=64),
        cache=CacheConfig(mode=options["mode"]),
        deterministic=True,
    )


Outputs = dict[str, tuple[int, ...]]


async def complete(engine: AsyncEngine, name: str, found: Outputs) -> int:
    """The tokens of one stage list into *found*; returns how many were cached."""
    params = SamplingParams(max_tokens=N_TOKENS, seed=1234, **STAGES[name])
    result = await engine.complete(PROMPTS[name], params)
    found[name] = result.token_ids
    return result.usage.cached_tokens


async def complete_all(engine: AsyncEngine) -> Outputs:
    """All stage lists at once, over fewer slots."""
    found: Outputs = {}
    async with anyio.create_task_group() as group:
        for name in STAGES:
            group.start_soon(complete, engine, name, found)
    return found


_alone: Outputs = {}


async def alone() -> Outputs:
    """The reference, computed once."""
    if not _alone:
        config = make_config(n_slots=1, mode="off")
        async with AsyncEngine.open(tiny_model("llama"), config) as engine:
            for name in STAGES:
                await complete(engine, name, _alone)
    return _alone


@contextmanager
def disturbed(engine: AsyncEngine, every: int, code: int) -> Iterator[None]:
    """
    Every so many decodes end as libllama ends them: 1, without room, or 2, aborted.

    One that finds no room has more than one sequence: alone it would be the end of it.
    """
    executor, n_calls = engine._parts.executor, 0
    compute = executor._outcome

    def compute_or_not(works, plan):
        nonlocal n_calls
        n_calls += 1
        if n_calls % every:
            return compute(works, plan)
        if code == 1 and len(works) > 1:
            executor._drop()
            return StepOutcome(1, [], [], 0, 0)
        if code == 2:
            executor._drop()  # what was begun ahead may have ended already
            for work in works:
                executor.stop(work.request_id)
            return compute(works, plan._replace(steady=False))
        return compute(works, plan)

    executor._outcome = compute_or_not
    try:
        yield
    finally:
        executor._outcome = compute


async def test_the_stage_lists_differ(anyio_backend):
    """
    No two references are the same, and most are long: a broken one would be seen.
    """
    found = await alone()

    assert len(set(found.values())) == len(STAGES)
    assert sum(len(tokens) >= 20 for tokens in found.values()) > len(STAGES) // 2


async def test_beside_others(anyio_backend):
    """
    In other slots, in batches with each other, from steps begun ahead or not.
    """
    expected = await alone()

    async with AsyncEngine.open(tiny_model("llama"), make_config()) as engine:
        found = await complete_all(engine)

    assert found == expected


async def test_beside_others_that_come_and_go(anyio_backend):
    """
    Streams that are left after some tokens drop steps that were begun for all.
    """
    expected = await alone()

    async with AsyncEngine.open(tiny_model("llama"), make_config()) as engine:

        async def disturb(number: int) -> None:
            params = SamplingParams(max_tokens=200, ignore_eos=True, seed=number)
            for n_tokens in range(1, 12):
                async with engine.generate(f"noise {number}", params) as generation:
                    async for _ in generation:
                        n_tokens -= 1  # noqa: PLW2901
                        if n_tokens < 0:
                            break

        found: Outputs = {}
        async with anyio.create_task_group() as group:
            for number in range(2):
                group.start_soon(disturb, number)
            for name in STAGES:
                group.start_soon(complete, engine, name, found)
        stats = engine.stats()

    assert stats.finished["cancelled"] > 10
    assert stats.dropped_steps > 0
    assert found == expected


async def test_through_preemption(anyio_backend):
    """
    Sequences lose their slots and are computed again, with what they said, elsewhere.
    """
    expected = await alone()

    async with AsyncEngine.open(tiny_model("llama"), make_config()) as engine:
        with disturbed(engine, every=9, code=1):
            found = await complete_all(engine)
        stats = engine.stats()

    assert stats.preempted > 5
    assert found == expected


async def test_through_aborted_steps(anyio_backend):
    """
    What was aborted is computed again and sampled once.
    """
    expected = await alone()

    async with AsyncEngine.open(tiny_model("llama"), make_config()) as engine:
        with disturbed(engine, every=3, code=2):
            found = await complete_all(engine)
        stats = engine.stats()

    assert stats.aborted_steps > 20
    assert found == expected


async def test_after_cache_hits(anyio_backend):
    """
    From live slots, and from host snapshots after other requests took the slots.
    """
    expected = await alone()

    async with AsyncEngine.open(tiny_model("llama"), make_config()) as engine:
        await complete_all(engine)
        n_cached, found = 0, {}
        for name in reversed(STAGES):
            n_cached += await complete(engine, name, found)
        again = await complete_all(engine)

    assert n_cached > 20 * len(STAGES)
    assert found == expected
    assert again == expected


async def test_as_one_of_several_outputs(anyio_backend):
    """
    The third output of n has the tokens of a request with its seed.
    """
    expected = await alone()

    async with AsyncEngine.open(tiny_model("llama"), make_config()) as engine:
        found = {}
        for name, given in STAGES.items():
            params = SamplingParams(max_tokens=N_TOKENS, seed=1232, n=3, **given)
            results = await engine.complete_n(PROMPTS[name], params)
            found[name] = results[2].token_ids

    assert found == expected
