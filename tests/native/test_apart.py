"""`deterministic="fast"`: rows have the bits of each by itself, by our kernels."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pyllama_raw import AsyncEngine, ConfigError, EngineConfig, SamplingParams
from pyllama_raw.errors import QuantizeFailed
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import llama_version
from pyllama_raw.native.model import Model, quantize
from tests.native.support import last_logits, make_context, prefill
from tests.support.last_digits import needs_attention
from tests.support.tiny import tiny_model

N_SLOTS, N_PROMPT, N_STEPS = 8, 40, 4
TOKENS = np.random.default_rng(0).integers(3, 200, (N_SLOTS, N_PROMPT), np.int32)
PROMPTS = [array("i", tokens.tolist()) for tokens in TOKENS]
KINDS = {  # of weights, and whether slots may share one pool of cells
    "llama": ("q4_0", True),
    "qwen2": ("q5_1", True),
    "bloom": ("q8_0", True),
    "llama-moe": ("q4_1", True),
    "qwen3moe": ("q5_0", True),
    "gemma3": ("q4_1", False),
}
REFUSED = {
    "llama": ("f16", "do not weave"),
    "gpt-oss": ("q4_0", "libllama computes"),  # its attention has sinks
    "mamba": ("q8_0", "libllama computes"),
    "gemma3": ("q8_0", "kv_unified=False"),
}

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("at_best_level"),
    needs_attention,
]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """The file of a tiny model in a type, made once."""
    folder = tmp_path_factory.mktemp("apart")

    def make(name: str, kind: str) -> Path:
        path = folder / f"{name}-{kind}.gguf"
        if not path.exists():
            try:
                quantize(tiny_model(name), path, kind)
            except QuantizeFailed as error:
                # A version before 0.5 leaves no tensor as it is whose rows are too short.
                if "no tensor type fallback" not in str(error):
                    raise
                pytest.skip(f"llama.cpp {llama_version()} makes no {kind} of {name!r}")
        return path

    return make


@pytest.fixture(scope="module", params=[*KINDS, "default"])
def model(request, quantised, model_path):
    if request.param == "default":
        path = model_path
    else:
        path = quantised(request.param, KINDS[request.param][0])
    with Model.load(path) as loaded:
        yield loaded


def contexts(model: Model, **fields: Any) -> Context:
    options = {"kv_unified": not model.n_swa, "n_ctx": 2048, "swa_full": True}
    options |= {
        "n_batch": N_SLOTS * N_PROMPT,
        "n_ubatch": 90,
    }  # micro-batches cut prompts
    return make_context(
        model, n_seq_max=N_SLOTS, deterministic="fast", **options | fields
    )


def outputs(context: Context, slots: list[int], slot: int, n_chunk: int) -> list[bytes]:
    """
    Rows of the prompt of *slot* and of the tokens behind it, beside other *slots*.

    Prompts are computed side by side in chunks of n_chunk tokens, the last in two.
    """
    rows, batch = [], Batch(context.n_batch)
    for start in range(0, N_PROMPT, n_chunk):
        batch.clear()
        end = min(start + n_chunk, N_PROMPT)
        for each in slots:
            batch.add(PROMPTS[each][start:end], start, each, True)
        context.decode(batch)
    rows.append(context.logits((slots.index(slot) + 1) * (end - start) - 1).tobytes())
    for step in range(N_STEPS):
        batch.clear()
        tokens = [10 + each + step for each in slots]
        batch.add_rows(tokens, [N_PROMPT + step] * len(slots), slots)
        context.decode(batch)
        rows.append(context.logits(slots.index(slot)).tobytes())
    return rows


def test_rows_have_the_bits_of_each_alone(model):
    """
    Whatever is computed beside it, in any order and by any number of threads, and however the
    prompt is cut; each has a kernel of ours, or no sums over more than a row.
    """
    with contexts(model) as context:
        expected = outputs(context, [5], 5, N_PROMPT)
        stray = context.kernels.stray
    ways = [
        ([5], 1, 1),
        ([5], 7, 2),
        (list(range(N_SLOTS)), N_PROMPT, 1),
        (list(range(N_SLOTS))[::-1], 3, 2),
        ([5, 0, 7], 1, 3),
    ]
    for slots, n_chunk, n_threads in ways:
        with contexts(model, n_threads=n_threads) as context:
            assert outputs(context, slots, 5, n_chunk) == expected, (slots, n_chunk)
    assert stray == ""


def test_rows_do_not_depend_on_where_cells_lie(model):
    """
    Cells that others have freed, and a prefix that a slot has from another one.
    """
    prompt = PROMPTS[5]
    with contexts(model) as context:
        expected = last_logits(context, prompt, slot=5).tobytes()
    with contexts(model) as context:
        for slot in (0, 1):
            prefill(context, PROMPTS[slot], slot=slot)
        prefill(context, prompt[:25], slot=2)
        context.seq_rm(0)
        prefill(context, prompt[25:33], slot=2, pos=25)
        context.seq_cp(2, 3)
        row = last_logits(context, prompt[33:], slot=3, pos=33).tobytes()

    assert row == expected


def drawn(number: int) -> tuple[list[int], SamplingParams]:
    temperature = (0.0, 0.8, 1.5)[number % 3]
    params = SamplingParams(
        max_tokens=12, temperature=temperature, seed=number, logprobs=2
    )
    return PROMPTS[number % N_SLOTS][: 5 + 3 * number].tolist(), params


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", ["default", "llama-moe"])
async def test_outputs_do_not_depend_on_other_requests(
    name, quantised, model_path, anyio_backend
):
    """
    Requests that come and go have the tokens and the log probabilities that they have alone,
    with prefixes of each other and without.
    """
    path = model_path if name == "default" else quantised(name, KINDS[name][0])
    config = EngineConfig(
        deterministic="fast",
        context={"n_ctx": 2048, "n_threads": 1},
        scheduler={"n_slots": 6, "token_budget": 23},
    )
    beside: dict[int, Any] = {}
    async with AsyncEngine.open(path, config) as engine:
        alone = [await engine.complete(*drawn(number)) for number in range(10)]

        async def run(number: int) -> None:
            beside[number] = await engine.complete(*drawn(number))

        for numbers in (range(10), reversed(range(10))):
            async with anyio.create_task_group() as group:
                for number in numbers:
                    group.start_soon(run, number)
            for number, output in enumerate(alone):
                assert beside[number].token_ids == output.token_ids
                assert beside[number].logprobs == output.logprobs


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", REFUSED)
async def test_a_model_that_cannot_is_refused(name, quantised, anyio_backend):
    """
    The error says why, and what can be done.
    """
    kind, why = REFUSED[name]
    config = EngineConfig(deterministic="fast", context={"n_ctx": 2048})

    with pytest.raises(ConfigError, match=why) as refused:
        async with AsyncEngine.open(quantised(name, kind), config):
            pass

    assert "deterministic=True" in str(refused.value)


async def test_cells_of_other_types_are_named_where_they_are_the_reason(
    quantised, anyio_backend
):
    """
    Their attention is libllama's.
    """
    cells = {"n_ctx": 2048, "type_k": "q8_0"}
    config = EngineConfig(deterministic="fast", context=cells)
    why = r"f16 only \(type_k='q8_0', type_v='f16'\)"

    with pytest.raises(ConfigError, match=why):
        async with AsyncEngine.open(quantised("llama", "q4_0"), config):
            pass
