"""
What the memory of a context can do, and what a snapshot of it costs.

Two short decodes tell how large a snapshot is; they also bring the weights into memory
before the first request.
"""

from __future__ import annotations

from pyllama_raw.config import ContextConfig
from pyllama_raw.core.snapshot_kind import SnapshotKind
from pyllama_raw.core.snapshots import SnapshotCost
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model

N_MORE = 2  # tokens of the second decode: each of them is time before the first answer
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
    Decode a little on the first slot of an empty *context*; it is empty again then.

    Raises:
        NativeError: the context cannot decode at all.
    """
    n_more = min(N_MORE, context.max_tokens, context.n_ctx_seq - 1)
    batch = Batch(context.max_tokens)
    batch.add([0], 0, 0, True)
    context.decode(batch)
    first = context.state_bytes(0)
    batch.clear()
    batch.add([0] * n_more, 1, 0, True)
    context.decode(batch)
    token_bytes = -(-(context.state_bytes(0) - first) // n_more)
    context.clear()
    return SnapshotCost(max(first - token_bytes, 0) + SLACK_BYTES, token_bytes)
