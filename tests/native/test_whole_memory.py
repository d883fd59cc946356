"""The whole memory of a context, copied to another context and used for a warm-up."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from pyllama_raw.engine.operations import captured, restored, warm_up
from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.memory import ALL_SLOTS
from pyllama_raw.native.model import Model
from tests.native.support import EXACT, last_logits, make_context, make_prompt, prefill
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native
UNIFIED: dict[str, Any] = {"kv_unified": True, "n_ctx": 256}
SPLIT: dict[str, Any] = {"kv_unified": False, "n_ctx": 512, "n_seq_max": 2}
DETERMINISTIC: dict[str, Any] = (
    SPLIT | EXACT | {"swa_full": True, "deterministic": True}
)
# Sums are in the order of cells there, which is another one where cells were in disorder.
BY_CELLS = {("qwen2vl", "unified"), ("gemma3", "split")}


@pytest.fixture(scope="module", params=["llama", "gemma3", "mamba", "jamba", "qwen2vl"])
def model(request):
    with Model.load(tiny_model(request.param)) as model:
        yield model


def tokens(model, n_tokens, seed):
    return type(make_prompt(1))(
        "i", (t % model.n_vocab for t in make_prompt(n_tokens, seed))
    )


def name_of(model) -> str:
    return model.meta["general.architecture"]


def fill(context) -> None:
    """Have slots whose cells lie in disorder: one of them was emptied and filled anew."""
    model = context.model
    prefill(context, tokens(model, 40, 1), slot=0)
    prefill(context, tokens(model, 24, 2), slot=1)
    context.seq_rm(0)
    prefill(context, tokens(model, 30, 3), slot=1, pos=24)
    prefill(context, tokens(model, 12, 4), slot=0)


def next_rows(context) -> list[np.ndarray]:
    """The logits of a next token in each slot."""
    row = tokens(context.model, 1, 5)
    return [
        last_logits(context, row, slot=0, pos=12),
        last_logits(context, row, slot=1, pos=54),
    ]


def are_equal(found, expected, *, to_the_bit: bool) -> bool:
    if to_the_bit:
        return [row.tobytes() for row in found] == [row.tobytes() for row in expected]
    return all(map(partial(np.allclose, atol=1e-3), found, expected))


@pytest.mark.parametrize(
    ("layout", "fields"),
    [("unified", UNIFIED), ("split", SPLIT), ("deterministic", DETERMINISTIC)],
)
def test_another_context_goes_on_with_the_same_bits(model, layout, fields):
    """
    Also where cells lie otherwise than before, if sums are in the order of positions.
    """
    with make_context(model, **fields) as context:
        fill(context)
        expected = next_rows(context)
    with make_context(model, **fields) as context:
        fill(context)
        state = captured(context)
    with make_context(model, **fields) as context:
        is_whole = restored(context, state)
        found = next_rows(context)

    assert is_whole
    is_exact = (name_of(model), layout) not in BY_CELLS
    assert are_equal(found, expected, to_the_bit=is_exact)


def test_cells_that_slots_share_are_one_again(model):
    """
    A context that could not hold them apart holds them.
    """
    if model.is_recurrent or model.is_hybrid or model.n_swa:
        pytest.skip("such memory shares nothing")
    prompt = tokens(model, 200, 1)
    with make_context(model, **UNIFIED) as context:
        prefill(context, prompt[:200])
        for slot in (1, 2, 3):
            context.seq_cp(0, slot)
        state = captured(context)
    with make_context(model, **UNIFIED) as context:
        is_whole = restored(context, state)
        ends = [context.seq_pos_max(slot) for slot in range(4)]
        last_logits(context, prompt[:40], slot=3, pos=200)

    assert (is_whole, ends) == (True, [199] * 4)


def test_what_is_no_copy_leaves_nothing(model):
    """
    A copy that was cut off, or is of another layout, is refused; the context can be used.
    """
    with make_context(model, **UNIFIED) as context:
        fill(context)
        expected = next_rows(context)
    with make_context(model, **UNIFIED) as context:
        fill(context)
        [(slot, state)] = copies = captured(context)
        context.clear()
        cut_off = [(slot, state[: len(state) - 8])]
        results = [restored(context, cut_off), captured(context)]
        with pytest.raises(SnapshotFailed):
            context.restore(ALL_SLOTS, state[:20])
        assert restored(context, copies)
        found = next_rows(context)

    assert results == [False, []]
    is_exact = (name_of(model), "unified") not in BY_CELLS
    assert are_equal(found, expected, to_the_bit=is_exact)


def test_a_warm_up_leaves_what_there_was(model):
    """
    An empty context is empty afterwards, another one holds what it held.
    """
    with make_context(model, **UNIFIED) as context:
        fill(context)
        expected = next_rows(context)
    with make_context(model, **UNIFIED) as context:
        states = [warm_up(context), captured(context)]
        fill(context)
        states.append(warm_up(context))
        found = next_rows(context)

    assert states == [True, [], True]
    is_exact = (name_of(model), "unified") not in BY_CELLS
    assert are_equal(found, expected, to_the_bit=is_exact)
