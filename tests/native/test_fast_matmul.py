"""Our kernel gives the bits of libllama's, for every shape of a batch."""

from array import array

import numpy as np
import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.fast_matmul import is_usable
from pyllama_raw.native.model import Model
from pyllama_raw.native.quantize import quantize
from tests.native.support import EXACT, last_logits, make_context, make_prompt
from tests.tiny import tiny_model

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def _kernel(request):
    if "anywhere" not in request.node.name and not is_usable():
        pytest.skip("this CPU has no AVX-512 VNNI, or there is another device")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def test_anywhere_it_is_used_unless_asked_not_to(model):
    """
    By default wherever it is usable; never against the will of the user.
    """
    with make_context(model) as default, make_context(model, fast_matmul=False) as off:
        assert default.fast_matmul == is_usable()
        assert not off.fast_matmul


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5, 6, 7, 13, 96, 97, 200])
@pytest.mark.parametrize("fields", [{}, EXACT])
def test_prompts_have_the_same_logits(model, n_tokens, fields):
    """
    One tile, several, an uneven rest, more columns than are computed at once.
    """
    prompt = make_prompt(n_tokens)
    with (
        make_context(model, **fields) as fast,
        make_context(model, fast_matmul=False, **fields) as slow,
    ):
        assert same_bits(last_logits(fast, prompt), last_logits(slow, prompt))


def test_streams_have_the_same_logits(model):
    """
    A graph that is used again begins anew, also after one of another size.
    """
    steps = [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [2], [0, 2], [0, 2]]
    with make_context(model) as fast, make_context(model, fast_matmul=False) as slow:
        for context in (fast, slow):
            for slot in range(4):
                last_logits(context, make_prompt(5, seed=slot), slot=slot)
        n_past = [5] * 4
        for slots in steps:
            places = [n_past[slot] for slot in slots]
            rows = []
            for context in (fast, slow):
                batch = Batch(context.n_batch)
                batch.add_rows([100] * len(slots), places, slots)
                context.decode(batch)
                rows.append([context.logits(row) for row in range(len(slots))])
            assert all(same_bits(a, b) for a, b in zip(*rows, strict=True))
            for slot in slots:
                n_past[slot] += 1


@pytest.mark.parametrize("n_threads", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(model, n_threads):
    """
    Also more threads than CPUs, and a change between two batches.
    """
    prompt = make_prompt(60)
    with make_context(model, fast_matmul=False) as slow:
        expected = last_logits(slow, prompt)
    with make_context(model, n_threads=n_threads) as context:
        assert same_bits(last_logits(context, prompt), expected)
        context.set_threads(1, 1)
        assert same_bits(last_logits(context, prompt, slot=1), expected)
        context.set_threads(n_threads, n_threads)
        assert same_bits(last_logits(context, prompt, slot=2), expected)


@pytest.mark.parametrize("name", ["llama", "jamba", "qwen3moe"])
def test_small_models_have_the_same_logits(name, tmp_path):
    """
    Other shapes: few rows, experts that libllama computes, recurrent layers.
    """
    path = tmp_path / "q4_1.gguf"
    quantize(tiny_model(name), path, "q4_1")
    with (
        Model.load(path) as model,
        make_context(model) as fast,
        make_context(model, fast_matmul=False) as slow,
    ):
        prompt = array("i", [i % model.n_vocab for i in range(1, 41)])
        assert same_bits(last_logits(fast, prompt), last_logits(slow, prompt))
