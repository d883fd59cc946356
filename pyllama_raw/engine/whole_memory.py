"""
The whole memory of a context: copied to host memory and back, and used for a warm-up.

A copy has all slots, and cells that slots share are shared again. So whoever planned what the
context holds need not know that another context holds it now.
"""

from __future__ import annotations

from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.arrays import Buffer, new_bytes
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.memory import ALL_SLOTS


def captured(context: Context) -> Buffer | None:
    """
    A copy of all that *context* holds; None: it holds nothing.

    Raises:
        SnapshotFailed, MemoryError: there is no copy, and nothing has changed.
    """
    slots = range(context.n_seq_max)
    if all(context.seq_pos_max(slot) is None for slot in slots):
        return None
    state = new_bytes(context.state_bytes(ALL_SLOTS))
    context.capture(ALL_SLOTS, state)
    return state


def restored(context: Context, state: object) -> bool:
    """Whether *context* holds what captured() has copied; False: it is empty."""
    if state is None:
        return True
    assert isinstance(state, memoryview)
    try:
        context.restore(ALL_SLOTS, state)
    except SnapshotFailed:
        return False
    return True


def warm_up(context: Context) -> bool:
    """
    Compute a micro-batch of a prompt, and a token in each of several slots, for nothing.

    Returns:
        False: what the context held is gone.

    Raises:
        SnapshotFailed, MemoryError: there is no room for a copy of what the context holds.
        NativeError: a decode has failed, and the context is empty.
    """
    state = captured(context)
    context.clear()
    try:
        _compute(context, {0: min(context.n_ubatch, context.n_ctx_seq)})
        context.clear()
        _compute(context, dict.fromkeys(range(_n_streams(context)), 1))
    finally:
        context.clear()
    return restored(context, state)


def _n_streams(context: Context) -> int:
    return min(context.n_seq_max, context.n_outputs_max, context.max_tokens)


def _compute(context: Context, n_tokens: dict[int, int]) -> None:
    """Decode so many tokens of each slot; the last one has an output row."""
    batch = Batch(context.max_tokens)
    token = context.model.vocab.bos or 0
    for slot, n in n_tokens.items():
        batch.add([token] * n, 0, slot, True)
    context.decode(batch)
