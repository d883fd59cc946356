"""The library that build_lib.py makes asks for huge pages (_ffi/memory/huge_pages.h)."""

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


def test_graphs_ask_for_huge_pages(model):
    """
    What the graphs of a context compute in may be huge pages, and is freed with it.
    """
    before = advised_kib()
    with Context(model, n_seq_max=1, n_ctx=4096, n_batch=4096, n_ubatch=4096):
        assert advised_kib() - before >= 4096

    assert advised_kib() <= before + 4096
