"""Our kernels: which operations they take; attention has the digits of libllama's."""

from array import array
from collections import Counter

import numpy as np
import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import new_bytes
from pyllama_raw.native.model import Model
from tests.native.support import (
    EXACT,
    best_level,
    last_logits,
    make_context,
    make_prompt,
    prefill,
)
from tests.support.last_digits import is_usable
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

PLAIN = {"flash_attn": "off"}  # then products are all we take
# Of logits, with 32-bit weights: libllama rounds queries and weights of values to 16 bits.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def model(model_path):
    """With weights as in the file: those in the order of AMX are left to libllama."""
    with Model.load(model_path, use_extra_bufts=False) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def _usable(request):
    if "anywhere" not in request.node.name and not is_usable("attention"):
        pytest.skip("this CPU has no AVX2, FMA and F16C, or there is another device")


@pytest.fixture
def _woven():
    """The best level of woven weights that the CPU has, even if it was not measured."""
    with best_level():
        yield


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def taken(context: Context) -> Counter[str]:
    """How many operations, by what they compute."""
    assert context.kernels is not None
    counts = context.kernels.taken.items()
    return Counter({row.computes: n for row, n in counts})


def test_anywhere_they_are_used_unless_asked_not_to(model):
    """
    By default wherever they are usable; never against the will of the user.
    """
    with make_context(model) as default, make_context(model, fast_kernels=False) as off:
        assert (default.kernels is not None) == is_usable("attention")
        assert off.kernels is None


@pytest.mark.usefixtures("_woven")
def test_they_take_what_they_are_for(model):
    """
    Every attention, and all products with Q4_1 and Q8_0 weights. Those of the output are embeddings, too.
    """
    with make_context(model) as context:
        for n_decodes, tokens in enumerate((make_prompt(10), array("i", [100])), 1):
            last_logits(context, tokens, pos=10 * n_decodes - 10)
            assert taken(context) == {
                "attention": n_decodes * model.n_layer,
                "q4_1": n_decodes * 7 * model.n_layer,
                # Rows of embeddings, too, when they are woven.
                "q8_0": n_decodes + (n_decodes > 1),
            }


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 97])
@pytest.mark.parametrize("fields", [PLAIN, EXACT])
def test_deterministic_prompts_have_the_logits_of_libllama(model, n_tokens, fields):
    """
    Where products alone are ours: of a column, of several, of more than are computed at once.
    """
    prompt = make_prompt(n_tokens)
    with (
        make_context(model, deterministic=True, **fields) as fast,
        make_context(model, fast_kernels=False, **fields) as slow,
    ):
        assert same_bits(last_logits(fast, prompt), last_logits(slow, prompt))


@pytest.mark.usefixtures("_woven")
def test_streams_have_the_logits_of_each_alone(model):
    """
    A graph that is used again begins anew, also after one of another size.
    """
    steps = [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [2], [0, 2], [0, 2]]
    with make_context(model) as together, make_context(model) as apart:
        for context in (together, apart):
            for slot in range(4):
                last_logits(context, make_prompt(5, seed=slot), slot=slot)
        n_past = [5] * 4
        for slots in steps:
            batch = Batch(together.n_batch)
            places = [n_past[slot] for slot in slots]
            batch.add_rows([100] * len(slots), places, slots)
            together.decode(batch)
            for row, slot in enumerate(slots):
                one = array("i", [100])
                alone = last_logits(apart, one, slot=slot, pos=n_past[slot])
                assert same_bits(np.asarray(together.logits(row)), alone)
                n_past[slot] += 1


@pytest.mark.usefixtures("_woven")
@pytest.mark.parametrize("n_streams", [3, 13])
def test_streams_behind_one_prefix_have_the_logits_of_each_alone(model, n_streams):
    """
    Cells that all see are read once for all of them, up to where their own begin.
    """
    slots = list(range(n_streams))
    options = {"n_seq_max": n_streams}
    with (
        make_context(model, **options) as together,
        make_context(model, **options) as apart,
    ):
        for context in (together, apart):
            prefill(context, make_prompt(100))
            for slot in slots[1:]:
                context.seq_cp(0, slot, 0, 100)
        batch = Batch(together.n_batch)
        batch.add_rows([200 + slot for slot in slots], [100] * n_streams, slots)

        together.decode(batch)

        for slot in slots:
            alone = last_logits(apart, array("i", [200 + slot]), slot=slot, pos=100)
            assert same_bits(np.asarray(together.logits(slot)), alone)


@pytest.mark.parametrize("fields", [PLAIN, {}])
@pytest.mark.parametrize("n_threads", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(model, n_threads, fields):
    """
    Also more threads than CPUs, and a change between two batches.
    """
    prompt = make_prompt(60)
    with make_context(model, **fields) as one:
        expected = last_logits(one, prompt)
    with make_context(model, n_threads=n_threads, **fields) as context:
        assert same_bits(last_logits(context, prompt), expected)
        context.clear()
        context.set_threads(1, 1)
        assert same_bits(last_logits(context, prompt), expected)
        context.clear()
        context.set_threads(n_threads, n_threads)
        assert same_bits(last_logits(context, prompt), expected)


def _mixed(context: Context, n_vocab: int) -> list[np.ndarray]:
    """Logits of sequences whose cells lie among each other's, after some were freed."""
    rng = np.random.default_rng(1)

    def tokens(n: int) -> array:
        return array("i", rng.integers(1, n_vocab, n).tolist())

    for slot in range(4):
        last_logits(context, tokens(20 + 7 * slot), slot=slot)
    context.seq_rm(1)
    rows = [
        last_logits(context, tokens(90), slot=1)
    ]  # partly in the cells of the old one
    batch = Batch(context.n_batch)
    batch.add(tokens(33), 90, 1, True)
    batch.add(tokens(3), 20, 0, True)
    batch.add(tokens(1), 34, 2, True)
    context.decode(batch)
    rows += [np.asarray(context.logits(row)) for row in (32, 35, 36)]
    batch.clear()
    batch.add_rows(tokens(3).tolist(), [123, 23, 35], [1, 0, 2])
    context.decode(batch)
    return [*rows, *(np.asarray(context.logits(row)) for row in range(3))]


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "bloom", "gemma3", "qwen3moe", "gpt-oss"]
)
def test_attention_has_the_digits_of_the_plain_one(name, kv_unified):
    """
    One pool and several, windows, heads that share keys, biases of heads; what it cannot do is
    left.
    """
    fields = {"kv_unified": kv_unified}
    with (
        Model.load(tiny_model(name)) as model,
        make_context(model, flash_attn="on", **fields) as fast,
        make_context(model, fast_kernels=False, **PLAIN, **fields) as plain,
    ):
        for a, b in zip(
            _mixed(fast, model.n_vocab), _mixed(plain, model.n_vocab), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(b).max())
        assert (taken(fast)["attention"] > 0) == (name != "gpt-oss")  # it has sinks


def _in_turn(context: Context, n_vocab: int) -> np.ndarray:
    """Logits of the last of three sequences that took cells in turn, 1,500 each."""
    rng = np.random.default_rng(2)
    for pos in range(0, 1500, 50):
        for slot in range(3):
            tokens = array("i", rng.integers(1, n_vocab, 50).tolist())
            logits = last_logits(context, tokens, slot=slot, pos=pos)
    return logits


def test_attention_reaches_over_many_cells():
    """
    Thousands, of which a token sees every third.
    """
    with (
        Model.load(tiny_model("llama")) as model,
        make_context(model, flash_attn="on", n_ctx=8192) as fast,
        make_context(model, fast_kernels=False, n_ctx=8192, **PLAIN) as plain,
    ):
        ours, expected = (_in_turn(c, model.n_vocab) for c in (fast, plain))
        np.testing.assert_allclose(
            ours, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()
        )


@pytest.mark.parametrize("kv_type", ["bf16", "q8_0"])
def test_other_types_of_cells_are_left_to_libllama(kv_type):
    """
    They work as without us.
    """
    fields = {"type_k": kv_type, "type_v": kv_type, "flash_attn": "on"}
    with (
        Model.load(tiny_model("llama")) as model,
        make_context(model, **fields) as fast,
        make_context(model, fast_kernels=False, **fields) as slow,
    ):
        assert same_bits(
            _mixed(fast, model.n_vocab)[-1], _mixed(slow, model.n_vocab)[-1]
        )
        assert taken(fast)["attention"] == 0


def _frees_below(context: Context, prompt: array) -> int:
    """Where cells below those of a prompt become free before its end."""
    last_logits(context, make_tokens(40, 5), slot=0)
    prefill(context, prompt[:60], slot=1)
    context.seq_rm(0)
    return 1


def _shares_a_prefix(context: Context, prompt: array) -> int:
    """The same, of a copy that shares its cells."""
    context.seq_cp(_frees_below(context, prompt), 2, 0, 60)
    return 2


def _restored(context: Context, prompt: array) -> int:
    """A state whose cells were out of order, among cells that others hold."""
    slot = _frees_below(context, prompt)
    prefill(context, prompt[60:90], slot=slot, pos=60)
    state = new_bytes(context.state_bytes(slot))
    context.capture(slot, state)
    context.seq_rm(slot, 40, -1)
    context.restore(3, state)
    context.seq_rm(3, 60, -1)
    return 3


@pytest.mark.parametrize("way", [_frees_below, _shares_a_prefix, _restored])
def test_where_cells_lie_changes_nothing(way):
    """
    The last logits have the bits of a prompt that was alone, however it was cut.
    """
    prompt = make_tokens(120, 6)
    with Model.load(tiny_model("llama")) as model, make_context(model) as alone:
        expected = last_logits(alone, prompt)
        with make_context(model) as context:
            slot = way(context, prompt)
            prefill(context, prompt[60:100], slot=slot, pos=60)

            seen = last_logits(context, prompt[100:], slot=slot, pos=100)

    assert same_bits(seen, expected)


def make_tokens(n_tokens: int, seed: int) -> array:
    return array("i", np.random.default_rng(seed).integers(3, 200, n_tokens).tolist())
