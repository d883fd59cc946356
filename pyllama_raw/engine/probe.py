"""
What the memory of a context can do, and what a snapshot of it costs.

A short decode tells how large a snapshot is; it also brings the weights into memory
before the first request.
"""

from __future__ import annotations

from pyllama_raw.config import ContextConfig
from pyllama_raw.core.snapshot_kind import SnapshotKind
from pyllama_raw.core.snapshots import SnapshotCost
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model

SLACK_BYTES = 256  # of a snapshot's head, which may differ a little by slot


def expected_kind(model: Model, context: ContextConfig) -> SnapshotKind:
    """
    What the facts of *model* say; recurrent state and windows are of use whole.

    That holds with swa_full too: libllama fills cells behind the window again when it
    needs some, and never saves them.
    """
    if model.is_recurrent or model.is_hybrid or model.n_swa > 0:
        return SnapshotKind.EXACT
    return SnapshotKind.RANGE if context.kv_unified else SnapshotKind.STATE


def measure(context: Context) -> SnapshotCost:
    """
    Decode one token and two of an empty *context*; it is empty again then.

    Raises:
        NativeError: the context cannot decode at all.
    """
    batch = Batch(context.max_tokens)
    batch.add([0], 0, 0, False)
    if context.n_seq_max > 1 and context.max_tokens > 2:
        batch.add([0, 0], 0, 1, True)  # on another slot, so that one decode does
        context.decode(batch)
        one, two = context.state_bytes(0), context.state_bytes(1)
    else:
        context.decode(batch)
        one = context.state_bytes(0)
        batch.clear()
        batch.add([0], 1, 0, True)
        context.decode(batch)
        two = context.state_bytes(0)
    context.clear()
    token_bytes = two - one
    return SnapshotCost(max(one - token_bytes, 0) + SLACK_BYTES, token_bytes)
