"""
Points of memory that cannot be cut, each without the positions that an earlier one has.

A recurrent state has no range of positions, so each part brings all of it, and a window is in the
parts of the positions that it holds.
"""

from array import array

import numpy as np
import pytest

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.step import Load, Piece, Save
from pyllama_raw.engine.layout import layout_of
from pyllama_raw.engine.operations import SlotOperations
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.options.config import CacheConfig, EngineConfig
from tests.native.support import last_logits, make_context, make_prompt, prefill
from tests.support.tiny import HYBRID, RECURRENT, SWA, tiny_model

pytestmark = pytest.mark.native

SCRATCH, POINTS = 3, (64, 80, 160)
TEXT, OTHER = make_prompt(POINTS[-1]), make_prompt(5, seed=1)
NAMES = [recipe.name for recipe in (*HYBRID, *SWA)]


def allowed(tokens: array, model: Model) -> array:
    return array("i", [token % model.n_vocab for token in tokens])


def saved(operations: SlotOperations, start: int, stop: int) -> Piece:
    """What slot 0 holds, as host memory keeps it."""
    save = Save(1, CacheTier.HOST, 0, start, stop, 2**30)
    return Piece(operations.run([save]).saved[1].payload, start, stop)


def logits_after(
    context: Context, operations: SlotOperations, *pieces: Piece
) -> np.ndarray:
    """What follows OTHER in a slot that is filled from *pieces*, while no other holds anything."""
    context.clear()
    n_tokens = pieces[-1].stop
    assert not operations.run([Load(1, pieces, n_tokens - 1)]).lost
    other = allowed(OTHER, context.model)
    return last_logits(context, other, slot=1, pos=n_tokens)


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_chain_of_points_is_as_good_as_a_whole_state(name, swa_full):
    """
    What follows has the same bits at each point, and a part has fewer bytes than all of a slot.
    """
    with (
        Model.load(tiny_model(name)) as model,
        make_context(model, flash_attn="off", swa_full=swa_full) as context,
    ):
        by_whole = SlotOperations(context, SnapshotKind.EXACT, SCRATCH)
        by_part = SlotOperations(context, SnapshotKind.CHAIN, SCRATCH)
        text, wholes, parts = allowed(TEXT, model), [], []
        for start, stop in zip((0, *POINTS), POINTS, strict=False):
            prefill(context, text[start:stop], pos=start)
            parts.append(saved(by_part, start, stop))
            wholes.append(saved(by_whole, 0, stop))

        wanted = [logits_after(context, by_whole, whole) for whole in wholes]
        found = [
            logits_after(context, by_part, *parts[: i + 1]) for i in range(len(POINTS))
        ]

    assert all(np.array_equal(*pair) for pair in zip(wanted, found, strict=True))
    assert parts[0].payload.nbytes == wholes[0].payload.nbytes
    assert parts[1].payload.nbytes < wholes[1].payload.nbytes


def kind_of(name: str, **options) -> SnapshotKind:
    with Model.load(tiny_model(name)) as model:
        return layout_of(model, EngineConfig(**options)).kind


@pytest.mark.parametrize("name", NAMES)
def test_points_are_whole_where_parts_cannot_be(name, tmp_path):
    """
    Files hold whole states, and split KV has no ranges.
    """
    files = CacheConfig(directory=tmp_path)

    kinds = [
        kind_of(name),
        kind_of(name, cache=files),
        kind_of(name, deterministic=True),
    ]

    assert kinds == [SnapshotKind.CHAIN, SnapshotKind.EXACT, SnapshotKind.EXACT]


@pytest.mark.parametrize("name", [recipe.name for recipe in RECURRENT])
def test_a_state_without_positions_has_no_parts(name):
    """
    It is whole, and needs no slot to be copied to.
    """
    assert kind_of(name) is SnapshotKind.EXACT
