"""
The whole memory of a context: copied to host memory and back, and used for a warm-up.

Cells that slots share are copied once, and shared again. So whoever planned what the
context holds need not know that another context holds it now.
"""

from __future__ import annotations

from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import check_decode, last_error
from pyllama_raw.native.memory import ALL_SLOTS
from pyllama_raw.native.pointers import Buffer, new_bytes

Copies = list[tuple[int, Buffer]]  # by slot, or one of all slots


def captured(context: Context) -> Copies:
    """
    Copies of all that *context* holds.

    Raises:
        SnapshotFailed, MemoryError: there is none, and nothing has changed.
    """
    slots = [
        slot
        for slot in range(context.n_seq_max)
        if context.seq_pos_max(slot) is not None
    ]
    if context.kv_unified or context.model.is_recurrent:  # slots may share cells
        slots = [ALL_SLOTS] if slots else []
    copies: Copies = []
    for slot in slots:
        copy = new_bytes(context.state_bytes(slot))
        context.capture(slot, copy)
        copies.append((slot, copy))
    return copies


def restored(context: Context, copies: object) -> bool:
    """Whether *context*, which is empty, holds what captured() has copied; else it is empty."""
    assert isinstance(copies, list)
    try:
        for slot, copy in copies:
            context.restore(slot, copy)
    except SnapshotFailed:
        context.clear()
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
    copies = captured(context)
    context.clear()
    try:
        _compute(context, {0: min(context.n_ubatch, context.n_ctx_seq)})
        context.clear()
        most = min(context.n_seq_max, context.n_outputs_max, context.max_tokens)
        _compute(context, dict.fromkeys(range(most), 1))
    finally:
        context.clear()
    return restored(context, copies)


def _compute(context: Context, n_tokens: dict[int, int]) -> None:
    """Decode so many tokens of each slot, and of sources as many as fit; the last has a row."""
    batch = Batch(context.max_tokens)
    token = context.model.vocab.bos or 0
    if context.model.reads_sources:
        n_each = context.n_ubatch // len(n_tokens)
        for slot in n_tokens:
            batch.add_scored([token] * n_each, 0, slot)
        check_decode(context.read_sources(batch).code, last_error())
        batch.clear()
    for slot, n in n_tokens.items():
        batch.add([token] * n, 0, slot, True)
    context.decode(batch)
