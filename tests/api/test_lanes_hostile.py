"""
Whatever parameters come, with tokens chosen on the backend: no abort, no untyped error.

Each history runs in a process of its own, which must end well.
"""

import json

import pytest

from tests.native.support import run_python
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

PREAMBLE = """
import json, math, sys
from random import Random
import anyio
from pyllama_raw import *
from pyllama_raw.options.sampling import STAGES

N_VOCAB = 257
rng = Random(4)

def open_engine(n_slots):
    config = EngineConfig(
        context=ContextConfig(n_ctx=256 * n_slots, n_threads=1),
        scheduler=SchedulerConfig(n_slots=n_slots),
        sampler_placement="backend",
    )
    return AsyncEngine.open(sys.argv[1], config)

def tell(engine, **found):
    stats = engine.stats()
    print(json.dumps(found | {"fallbacks": stats.lane_fallbacks}), flush=True)
"""

RANDOM_SETS = """
SERVED = {
    "temperature": (0, 0.5, 1, 1.7), "top_k": (1, 40, 100), "top_p": (0.1, 0.95, 1),
    "min_p": (0, 0.05, 1), "min_keep": (0, 3), "typical_p": (1, 0.5),
    "xtc_probability": (0, 0.5), "dynatemp_range": (0, 0.3), "seed": (None, 0, 2**32 - 2),
    "adaptive_target": (None, 0.3), "logprobs_of": ("sampler",), "logprobs": (None, 3),
    "ignore_eos": (False, True), "min_tokens": (0, 2), "n": (1, 1, 1, 2),
    "suppress_tokens": ((), tuple(range(5))), "stages": (STAGES, ("top_k", "penalties")),
}
ALL = SERVED | {
    "top_k": (0, 129, 10**6), "repeat_penalty": (1, 1.2), "penalty_last_n": (0, 5, None),
    "dry_multiplier": (0, 0.8), "mirostat": (0, 1, 2), "logprobs_of": ("model", "sampler"),
    "prompt_logprobs": (None, 1), "suppress_tokens": (tuple(range(200)),),
    "logit_bias": ({}, {7: 3.0}), "stages": (STAGES, ("top_p", "top_k"), ()),
}

def valid(choices):
    few = set(rng.sample(sorted(choices), rng.randrange(len(choices))))
    if "logprobs" in few:
        few.add("logprobs_of")
    return {name: rng.choice(choices[name]) for name in sorted(few)}

async def main():
    seen = {"backend": 0, "host": 0}
    async with open_engine(4) as engine:
        async def one(choices):
            params = SamplingParams(max_tokens=rng.randrange(2, 6), **valid(choices))
            prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 20))]
            for result in await engine.complete_n(prompt, params):
                seen[result.sampler.placement] += 1
        for index in range(125):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(one, ALL if index % 32 == 31 else SERVED)
        tell(engine, **seen)
anyio.run(main)
"""

SWITCHES = """
KEYS = ({"temperature": 0}, {}, {"top_k": 5}, {"top_k": 0}, {"logprobs": 1},
        {"repeat_penalty": 1.2}, {"min_p": 0}, {"top_k": 9, "xtc_probability": 0.5})

async def main():
    seen = {"backend": 0, "host": 0}
    async with open_engine(1) as engine:
        for index in range(100):
            params = SamplingParams(max_tokens=3, seed=1, **KEYS[index % len(KEYS)])
            result = await engine.complete([5, 6, 7], params)
            seen[result.sampler.placement] += 1
        tell(engine, **seen)
anyio.run(main)
"""

HOSTILE = """
WILD = (-1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63, -2**63, 10**30, 1e-45, 1e-300, 1e300,
        -0.0, math.inf, -math.inf, math.nan, None, "", "x", b"x", (), (1,), {}, {1: 1},
        {-1: math.nan}, {2**31: 1.0}, ("top_k",), ("top_k", "top_k"), True, object())

async def main():
    fields = sorted(SamplingParams.model_fields)
    seen = {"refused": 0, "answered": 0}
    async with open_engine(2) as engine:
        for _ in range(500):
            given = {name: rng.choice(WILD) for name in rng.sample(fields, rng.choice((1, 1, 2, 4)))}
            try:
                params = SamplingParams(**({"max_tokens": 3} | given))
                if params.max_tokens > 100 or params.n > 8:
                    params = params.model_copy(update={"max_tokens": 100, "n": 1})
                await engine.complete_n([5, 6, 7], params)
                seen["answered"] += 1
            except PyllamaError:
                seen["refused"] += 1
        await engine.complete([5, 6], SamplingParams(max_tokens=3))
        tell(engine, **seen)
anyio.run(main)
"""


def play(code: str) -> dict[str, int]:
    done = run_python(PREAMBLE + code, tiny_model("llama"))
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_a_thousand_random_sets_of_parameters():
    """
    All kinds at once on four slots: each output tells where it was sampled, and those on
    the host are counted.
    """
    found = play(RANDOM_SETS)

    assert found["backend"] + found["host"] >= 1000
    assert min(found["backend"], found["host"]) > 100
    assert found["fallbacks"] == found["host"]


def test_a_hundred_switches_on_one_slot():
    """
    Three kinds are served by the lanes; the fourth ends them, and all later ones know.
    """
    found = play(SWITCHES)

    assert found == {"backend": 3, "host": 97, "fallbacks": 97}


def test_five_hundred_hostile_values():
    """
    Refused with a typed error or served; the engine works afterwards.
    """
    found = play(HOSTILE)

    assert found["refused"] + found["answered"] == 500
    assert min(found["refused"], found["answered"]) > 20
