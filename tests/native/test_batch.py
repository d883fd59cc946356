"""Filling a batch: slices of many tokens, rows of many sequences."""

from array import array

import numpy as np
import pytest

from pyllama_raw.errors import InvalidBatch
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.libllama import ffi

pytestmark = pytest.mark.native


def as_c_sees_it(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(token, pos, seq_id, logits) of every row, read through the C struct."""
    raw = batch.raw
    assert raw.embd == ffi.NULL
    assert all(raw.n_seq_id[i] == 1 for i in range(raw.n_tokens))
    return [
        (raw.token[i], raw.pos[i], raw.seq_id[i][0], raw.logits[i])
        for i in range(raw.n_tokens)
    ]


@pytest.mark.parametrize(
    "tokens", [array("i", [5, 6, 7]), [5, 6, 7], np.array([5, 6, 7], np.int32)]
)
def test_a_run_of_tokens(tokens):
    """
    Positions count up from pos; only the last token has an output row, if asked.
    """
    batch = Batch(8)
    batch.add(tokens, 10, 2, True)
    batch.add(tokens, 0, 3, False)

    assert as_c_sees_it(batch) == [
        (5, 10, 2, 0), (6, 11, 2, 0), (7, 12, 2, 1),
        (5, 0, 3, 0), (6, 1, 3, 0), (7, 2, 3, 0),
    ]  # fmt: skip
    assert (batch.n_tokens, batch.n_outputs) == (6, 1)


def test_rows_of_many_sequences():
    """
    One token each, every one with an output row, wherever it stands.
    """
    batch = Batch(8)
    batch.add([1], 4, 0, False)
    batch.add_rows([7, 8], [3, 9], [5, 2])

    assert as_c_sees_it(batch) == [(1, 4, 0, 0), (7, 3, 5, 1), (8, 9, 2, 1)]
    assert batch.n_outputs == 2


def test_a_cleared_batch_remembers_nothing():
    """
    clear() and new tokens leave no output rows of the last step behind.
    """
    batch = Batch(4)
    batch.add_rows([1, 2, 3, 4], [0] * 4, [0, 1, 2, 3])
    batch.clear()
    batch.add([9, 9], 0, 1, False)

    assert as_c_sees_it(batch) == [(9, 0, 1, 0), (9, 1, 1, 0)]
    assert batch.n_outputs == 0


def test_nothing_is_added_of_nothing():
    """
    Empty runs and rows change nothing.
    """
    batch = Batch(4)
    batch.add([], 0, 0, True)
    batch.add_rows([], [], [])

    assert (batch.n_tokens, batch.n_outputs) == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "pos", "seq_id", "message"),
    [
        ([1] * 5, 0, 0, r"0 \+ 5 tokens, the capacity is 4"),
        ([1], -1, 0, "pos 0 to"),
        ([1], 2**31 - 1, 0, "pos 0 to"),
        ([1], 0, -1, "seq_id must be 0 to"),
        ([1], 0, 256, "seq_id must be 0 to"),
    ],
)
def test_what_does_not_fit_is_refused(tokens, pos, seq_id, message):
    """
    No room, or a number numpy would wrap: refused, with nothing added.
    """
    batch = Batch(4)

    with pytest.raises(InvalidBatch, match=message):
        batch.add(tokens, pos, seq_id, True)
    with pytest.raises(InvalidBatch, match=message):
        batch.add_rows(tokens, [pos] * len(tokens), [seq_id] * len(tokens))
    assert (batch.n_tokens, batch.n_outputs) == (0, 0)


def test_a_batch_needs_a_capacity():
    """
    A batch of nothing cannot be made.
    """
    with pytest.raises(InvalidBatch, match="capacity=0"):
        Batch(0)
