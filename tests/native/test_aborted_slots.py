"""
An aborted decode leaves no gap between the cells of a slot, so the next one has the same bits.

libllama computes slots that are not neighbours one after the other, if each has cells of its
own, and a bug of it (MENDS of build_lib.py) confuses where those search their next cell that
it did not reach. It shows where one slot has one or two tokens more than another, or as many.
"""

from array import array
from contextlib import suppress

import numpy as np
import pytest

from pyllama_raw.errors import DecodeAborted, NoKVSpace
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import AbortFlag, Context
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model
from tests.native.support import EXACT, make_context, prefill
from tests.support.tiny import ATTENTION, SWA, tiny_model

pytestmark = pytest.mark.native

# Memory that can be cut: rotated, ALiBi, M-RoPE (which cannot shift), windows, experts.
NAMES = [recipe.name for recipe in (*ATTENTION, *SWA) if recipe.generates]
N_TOKENS = 10  # of slot 2


@pytest.fixture(params=[True, False], ids=["mended", "not mended"])
def is_mended(request):
    """The library as it is, if it is mended, and as if it was not known to be."""
    before = lib.plr_set_mended(request.param)
    if request.param and not before:
        pytest.skip("the library is not mended")
    yield request.param
    lib.plr_set_mended(before)


def decode(context: Context, *rows: tuple[int, int]) -> np.ndarray:
    """Token 5 at a position of each slot; the logits of the last one."""
    batch = Batch(8)
    slots, positions = zip(*rows, strict=True)
    batch.add_rows([5] * len(rows), list(positions), list(slots))
    context.decode(batch)
    return np.asarray(context.logits(len(rows) - 1))


def last_row(model: Model, n_other: int, *, aborts: bool) -> np.ndarray:
    """The row of a token of slot 2, before which a decode with slot 0 may have been aborted."""
    with (
        AbortFlag() as abort,
        make_context(
            model, n_seq_max=3, abort=abort, deterministic=True, swa_full=True, **EXACT
        ) as context,
    ):
        prefill(context, array("i", range(40, 40 + n_other)), slot=0)
        prefill(context, array("i", range(20, 20 + N_TOKENS)), slot=2)
        if aborts:
            abort.set()
            with suppress(DecodeAborted):
                decode(context, (0, n_other), (2, N_TOKENS))
            abort.clear()
            assert context.cut(0, n_other)
            assert context.cut(2, N_TOKENS)
        return decode(context, (2, N_TOKENS))


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_that_an_abort_did_not_reach_has_the_bits_of_one_undisturbed(
    name, is_mended
):
    """
    Whatever the other slot holds: behind it, as far, and before it.
    """
    with Model.load(tiny_model(name), use_extra_bufts=False) as model:
        n_others = range(N_TOKENS - 2, N_TOKENS + 4)
        differ = [
            n_other
            for n_other in n_others
            if not np.array_equal(
                last_row(model, n_other, aborts=True),
                last_row(model, n_other, aborts=False),
            )
        ]

    assert differ == []


@pytest.mark.parametrize(("slots", "ends"), [((0, 1, 2), True), ((0, 2), False)])
def test_a_library_with_the_bug_computes_slots_apart_to_their_end(slots, ends):
    """
    Only where slots are no neighbours: an abort is worth its time elsewhere.
    """
    before = lib.plr_set_mended(False)
    try:
        with (
            Model.load(tiny_model("llama")) as model,
            AbortFlag() as abort,
            make_context(model, n_seq_max=3, abort=abort, **EXACT) as context,
        ):
            abort.set()
            try:
                decode(context, *((slot, 0) for slot in slots))
                aborted = False
            except DecodeAborted:
                aborted = True
    finally:
        lib.plr_set_mended(before)

    assert aborted == ends


def test_a_decode_that_found_no_space_leaves_no_gap():
    """
    A slot has the bits of one undisturbed, though its neighbours had no cells left.
    """
    if not lib.plr_set_mended(True):
        lib.plr_set_mended(False)
        pytest.skip("the library is not mended")
    with Model.load(tiny_model("llama"), use_extra_bufts=False) as model:

        def row(n_other: int, *, fails: bool) -> np.ndarray:
            options = {"n_ctx": 5 * 256, "deterministic": True, **EXACT}
            with make_context(model, n_seq_max=5, **options) as context:
                prefill(context, array("i", range(40, 40 + n_other)), slot=0)
                prefill(context, array("i", range(20, 20 + N_TOKENS)), slot=2)
                prefill(context, array("i", [50] * 256), slot=4)  # full
                if fails:
                    with pytest.raises(NoKVSpace):
                        decode(context, (0, n_other), (2, N_TOKENS), (4, 256))
                return decode(context, (2, N_TOKENS))

        differ = [
            n_other
            for n_other in range(N_TOKENS - 2, N_TOKENS + 4)
            if not np.array_equal(row(n_other, fails=True), row(n_other, fails=False))
        ]

    assert differ == []
