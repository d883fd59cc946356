"""The cells of a new context are zero without being written (_ffi/memory/zeroed.cpp)."""

import os
import sys
from pathlib import Path

import pytest

from pyllama_raw.native.context import Context

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="libllama writes them there"),
]


def resident_bytes() -> int:
    """Memory of this process that is not of files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def test_cells_take_memory_when_they_are_used(model):
    """
    A new context holds a small part of what its cells can take.
    """
    n_ctx = 2**14
    n_embd_kv = model.n_embd // model.n_head * model.n_head_kv
    cells_bytes = 2 * 2 * n_ctx * model.n_layer * n_embd_kv  # keys and values, f16
    before = resident_bytes()

    with Context(model, n_seq_max=1, n_ctx=n_ctx, n_batch=64):
        taken = resident_bytes() - before

    assert cells_bytes >= 2**26
    assert taken < cells_bytes / 4
