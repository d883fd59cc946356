"""What is computed side by side, where outputs must not depend on it."""

from array import array

import numpy as np
import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model, quantize
from scripts.tiny_models import gguf
from scripts.tiny_models.recipe import Recipe, experts, sizes
from tests.native.support import EXACT, last_logits, make_context, prefill
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N_SLOTS, N_PROMPT = 9, 20
TOKENS = np.random.default_rng(0).integers(3, 200, (N_SLOTS, N_PROMPT), np.int32)
PROMPTS = [array("i", tokens.tolist()) for tokens in TOKENS]
WIDE = sizes(2, 1, n_embd=256, n_ff=256)  # rows of whole blocks of 256 weights
BLOCKS = {"blocks": WIDE, "blocks-moe": WIDE | experts()}


@pytest.fixture(
    scope="module", params=["llama", "llama-moe", "gemma3", "jamba", *BLOCKS]
)
def model(request, tmp_path_factory):
    """With floats, or in blocks of 256 weights."""
    name, path = request.param, None
    if name in BLOCKS:
        folder = tmp_path_factory.mktemp(name)
        gguf.write(Recipe(name, "llama", BLOCKS[name]), folder / "floats.gguf")
        path = folder / "blocks.gguf"
        quantize(folder / "floats.gguf", path, "q4_k_m")
    with Model.load(path or tiny_model(name), use_extra_bufts=False) as loaded:
        yield loaded


def contexts(model: Model, **fields) -> Context:
    return make_context(model, n_seq_max=N_SLOTS, deterministic=True, **EXACT, **fields)


def streams(context: Context, n_streams: int) -> list[np.ndarray]:
    """Logits of the first stream in three steps, after prompts in all slots."""
    for slot, prompt in enumerate(PROMPTS):
        prefill(context, prompt, slot=slot)
    found = []
    for step in range(3):
        batch = Batch(context.n_batch)
        slots = list(range(n_streams))
        batch.add_rows([10 + i for i in slots], [N_PROMPT + step] * n_streams, slots)
        context.decode(batch)
        found.append(np.asarray(context.logits(0)).copy())
    return found


@pytest.mark.parametrize("fast_kernels", [True, False])
def test_a_stream_has_the_bits_of_it_alone(model, fast_kernels):
    """
    However many others are beside it.
    """
    found = []
    for n_streams in (1, 2, N_SLOTS):
        with contexts(model, fast_kernels=fast_kernels) as context:
            found.append(streams(context, n_streams))

    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("n_first", [2, 7, 8])
def test_a_prompt_has_the_bits_of_it_as_a_whole(model, n_first):
    """
    Wherever it is cut, into chunks of two tokens or more.
    """
    (prompt, *_), found = PROMPTS, []
    with contexts(model) as context:
        found.append(last_logits(context, prompt).copy())
        prefill(context, prompt[:n_first], slot=1)
        found.append(last_logits(context, prompt[n_first:], slot=1, pos=n_first))

    assert np.array_equal(*found)
