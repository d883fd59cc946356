"""Small helpers of the native tests."""

import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.kernels import woven_levels
from pyllama_raw.native.libllama import WOVEN, lib, text
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowSampler, RowSamplers, SamplerChain
from tests.support.limits import LIMIT_S

N_THREADS = 1  # more only wait for each other on a machine that is busy

ANY_SLOT = "takes slots up to 255 where slots share cells"

# Bit-identical however the work is cut: design.md 8.
EXACT: dict[str, Any] = {"kv_unified": False, "flash_attn": "off"}


def unlike_before(difference: str) -> pytest.MarkDecorator:
    """A mark of a test of what the llama.cpp before the pinned one does otherwise."""
    return pytest.mark.skipif(
        not hasattr(lib, "LLAMA_LAZY_MODE_ON"), reason=f"this llama.cpp {difference}"
    )


@contextmanager
def best_level() -> Iterator[None]:
    """Woven weights by the best level of this CPU, which may not be the one that was measured."""
    assert lib.plr_woven_choose(woven_levels()[-1].encode())
    try:
        yield
    finally:
        # The environment may have chosen one for all tests.
        assert lib.plr_woven_choose(os.environ.get(WOVEN, "auto").encode())


def make_context(model: Model, *, n_seq_max: int = 4, **fields: Any) -> Context:
    options = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 256, "n_threads": N_THREADS}
    return Context(model, n_seq_max=n_seq_max, **(options | fields))


def make_prompt(n_tokens: int, seed: int = 0) -> array:
    tokens = np.random.default_rng(seed).integers(100, 20_000, n_tokens, np.int32)
    return array("i", tokens.tolist())


def prefill(context: Context, tokens: array, *, slot: int = 0, pos: int = 0) -> None:
    """Compute *tokens*; the last one has an output row."""
    batch = Batch(context.n_batch)
    batch.add(tokens, pos, slot, True)
    context.decode(batch)


def last_logits(
    context: Context, tokens: array, *, slot: int = 0, pos: int = 0
) -> np.ndarray:
    prefill(context, tokens, slot=slot, pos=pos)
    return np.asarray(context.logits(len(tokens) - 1))


def generate(
    context: Context,
    prompt: array,
    n_tokens: int,
    sampler: RowSampler,
    *,
    slot: int = 0,
) -> list[int]:
    """Prefill and then decode one token a step."""
    batch, samplers = Batch(context.n_batch), RowSamplers(1)
    samplers.set_all([sampler])
    batch.add(prompt, 0, slot, True)
    output: list[int] = []
    while True:
        outcome = context.step(batch, samplers)
        assert (outcome.code, outcome.codes) == (0, [])
        output.append(outcome.tokens[0])
        if len(output) == n_tokens:
            return output
        batch.clear()
        batch.add_rows([output[-1]], [len(prompt) + len(output) - 1], [slot])


def names_of(chain: SamplerChain) -> tuple[str, ...]:
    """
    The stages in order.

    A question mark is one that does nothing; a plus runs in the graph, a minus cannot.
    """
    stages = (
        lib.llama_sampler_chain_get(chain.ptr, i)
        for i in range(lib.llama_sampler_chain_n(chain.ptr))
    )
    return tuple(text(lib.llama_sampler_name(stage)) for stage in stages)


def run_python(code: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run *code* in a fresh interpreter, where an abort harms nothing."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
