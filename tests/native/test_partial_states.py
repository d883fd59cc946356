"""
Partial states of libllama: the recurrent part, or the window, without the attention before it.

A point of a prompt can be restored from a whole state of a longer prompt with the same beginning:
that state, then the partial one of the point, then a cut behind the point.
"""

from array import array
from typing import Any

import numpy as np
import pytest

from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Model
from tests.native.support import (
    EXACT,
    last_logits,
    make_context,
    make_prompt,
    prefill,
)
from tests.tiny import HYBRID, SWA, tiny_model

pytestmark = pytest.mark.native

WHOLE, PARTIAL = 0, 1  # llama.h: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
POINT, LENGTH = 64, 128
TEXT, OTHER = make_prompt(LENGTH), make_prompt(5, seed=1)
NAMES = [recipe.name for recipe in (*HYBRID, *SWA)]


def allowed(tokens: array, model: Model) -> array:
    return array("i", [token % model.n_vocab for token in tokens])


def captured(context: Context, slot: int, flags: int) -> Any:
    n_bytes = lib.llama_state_seq_get_size_ext(context.ptr, slot, flags)
    state = ffi.new("uint8_t[]", n_bytes)
    assert (
        lib.llama_state_seq_get_data_ext(context.ptr, state, n_bytes, slot, flags)
        == n_bytes
    )
    return state


def restore(context: Context, slot: int, state: Any, flags: int) -> None:
    n_bytes = len(state)
    assert (
        lib.llama_state_seq_set_data_ext(context.ptr, state, n_bytes, slot, flags)
        == n_bytes
    )


@pytest.fixture(params=NAMES)
def states(request):
    """A context whose slot 0 holds TEXT, and states of it at the point and at the end."""
    with (
        Model.load(tiny_model(request.param)) as model,
        make_context(model, **EXACT) as context,
    ):
        text = allowed(TEXT, model)
        prefill(context, text[:POINT])
        partial = captured(context, 0, PARTIAL)
        at_point = captured(context, 0, WHOLE)
        prefill(context, text[POINT:], pos=POINT)
        yield context, partial, at_point, captured(context, 0, WHOLE)


def test_a_point_is_restored_over_a_longer_state(states):
    """
    In a slot that was empty, and in the one that has gone on: what follows has the same bits as
    after a whole state of the point, and the partial one is smaller.
    """
    context, partial, at_point, at_end = states
    other = allowed(OTHER, context.model)
    restore(context, 1, at_point, WHOLE)
    wanted = last_logits(context, other, slot=1, pos=POINT)
    restore(context, 2, at_end, WHOLE)

    found = []
    for slot in (0, 2):
        restore(context, slot, partial, PARTIAL)
        assert context.seq_rm(slot, POINT)
        assert context.seq_pos_max(slot) == POINT - 1
        found.append(last_logits(context, other, slot=slot, pos=POINT))

    assert [np.array_equal(each, wanted) for each in found] == [True, True]
    assert len(partial) < len(at_point) < len(at_end)
