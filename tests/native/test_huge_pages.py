"""The library that build_lib.py makes asks for huge pages (_ffi/huge_pages.h)."""

import os
import re
from pathlib import Path

import pytest

from pyllama_raw.native.context import Context

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
        reason="this kernel has none to ask for",
    ),
    pytest.mark.skipif(
        "PYLLAMA_RAW_PREFIX" in os.environ,
        reason="that libllama was compiled without our header",
    ),
]


def advised_kib() -> int:
    """How much of this process's memory has asked for huge pages."""
    smaps = Path("/proc/self/smaps").read_text()
    areas = re.findall(r"(?ms)^Size: +(\d+) kB$.*?^VmFlags: ([^\n]*)$", smaps)
    return sum(int(size) for size, flags in areas if "hg" in flags.split())


def test_cells_ask_for_huge_pages(model):
    """
    The KV cells of a context lie in memory that may be huge pages, and leave it.
    """
    before = advised_kib()
    with Context(model, n_seq_max=1, n_ctx=4096) as context:
        n_embd_kv = model.n_embd // model.n_head * model.n_head_kv
        keys_bytes = 2 * context.n_ctx * model.n_layer * n_embd_kv  # f16
        cells_kib = 2 * keys_bytes // 1024

        assert advised_kib() - before >= 0.9 * cells_kib

    assert advised_kib() <= before + 4096
