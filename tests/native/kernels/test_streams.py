"""Streams side by side, where outputs must not depend on others."""

from array import array

import numpy as np
import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.kernels import table
from pyllama_raw.native.model import Model
from tests.native.support import EXACT, make_context, prefill
from tests.tiny import tiny_model

pytestmark = pytest.mark.native

N_SLOTS, N_PROMPT = 6, 20


def streams(context: Context, n_streams: int) -> list[np.ndarray]:
    """Logits of the first stream in three steps, after prompts in all slots."""
    tokens = np.random.default_rng(0).integers(3, 200, (N_SLOTS, N_PROMPT), np.int32)
    for slot, prompt in enumerate(tokens):
        prefill(context, array("i", prompt.tolist()), slot=slot)
    found = []
    for step in range(3):
        batch = Batch(context.n_batch)
        slots = list(range(n_streams))
        batch.add_rows([10 + i for i in slots], [N_PROMPT + step] * n_streams, slots)
        context.decode(batch)
        found.append(context.logits(0).copy())
    return found


@pytest.mark.parametrize("name", ["llama", "llama-moe", "gemma3", "jamba"])
@pytest.mark.parametrize("fast_kernels", [True, False])
def test_a_stream_has_the_bits_of_it_alone(name, fast_kernels):
    """
    However many others are beside it. libllama multiplies floats with several columns by
    another kernel than with one.
    """
    if not any(row.is_usable for row in table() if row.computes == "streams"):
        pytest.skip("this CPU is no x86-64, or there is another device")
    options = {"deterministic": True, "fast_kernels": fast_kernels, **EXACT}
    found = []
    with Model.load(tiny_model(name)) as model:
        for n_streams in (1, 2, N_SLOTS):
            with make_context(model, n_seq_max=N_SLOTS, **options) as context:
                found.append(streams(context, n_streams))

    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
