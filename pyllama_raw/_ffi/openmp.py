"""
The time that threads of libgomp wait awake for each other, before they sleep.

libgomp reads its variables once, when it is loaded; so they are set while it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path

# libgomp's own is 300,000, about 3 ms or more. A thread then keeps its CPU awake while the one it
# waits for has none, because another program computes. So few cost nothing on a quiet machine.
SPINS = 1000
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

_log = getLogger(__name__)


@contextmanager
def short_spins(maps: Path = Path("/proc/self/maps")) -> Iterator[None]:
    """
    Let a libgomp that the block loads spin SPINS times, where the user has chosen nothing.

    Child processes inherit no variable of ours.
    """
    if any(name in os.environ for name in VARIABLES):
        yield
        return
    if _is_loaded(maps):
        _log.info(
            "libgomp was loaded before pyllama_raw, so its threads spin as it chose: where "
            "other programs compute, set GOMP_SPINCOUNT=%d before Python starts",
            SPINS,
        )
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def _is_loaded(maps: Path) -> bool:
    """Whether the libgomp of the system is; wheels bring copies by other names."""
    try:
        return "/libgomp.so.1" in maps.read_text()
    except OSError:
        return False
