"""
What the memory of a context can do, found out by asking it.

Two short decodes tell how large a snapshot is, and one partial removal whether the
memory can be cut; they also bring the weights into memory before the first request.
"""

from __future__ import annotations

from pyllama_raw.core.reuse import SnapshotCost
from pyllama_raw.core.snapshot_kind import SnapshotKind
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context

SLACK_BYTES = 256  # of a snapshot's head, which may differ a little by slot


def expected_kind(context: Context, *, cuts_window: bool) -> SnapshotKind:
    """What the model's facts say; *cuts_window*: a window cache keeps all positions."""
    model = context.model
    if model.is_recurrent or model.is_hybrid or (model.n_swa > 0 and not cuts_window):
        return SnapshotKind.EXACT
    return SnapshotKind.RANGE if context.kv_unified else SnapshotKind.STATE


def probe(context: Context, kind: SnapshotKind) -> tuple[SnapshotKind, SnapshotCost]:
    """
    Measure on the first slot of an empty *context*, which is empty again afterwards.

    Returns:
        The kind (EXACT if the memory refuses to be cut) and the cost of a snapshot.

    Raises:
        NativeError: the context cannot decode at all.
    """
    n_more = min(16, context.max_tokens - 1, context.n_ctx_seq - 2)
    batch = Batch(context.max_tokens)
    batch.add([0], 0, 0, True)
    context.decode(batch)
    first = context.state_bytes(0)
    batch.clear()
    batch.add([0] * n_more, 1, 0, True)
    context.decode(batch)
    token_bytes = -(-(context.state_bytes(0) - first) // n_more)
    if not context.seq_rm(0, n_more, -1):
        kind = SnapshotKind.EXACT
    context.clear()
    base_bytes = max(first - token_bytes, 0) + SLACK_BYTES
    return kind, SnapshotCost(base_bytes, token_bytes)
