"""Tokens are the same wherever they are chosen, by slots and caches (scripts/try_placements.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.try_placements import generating
from tests.support.limits import LIMIT_S

ROOT = Path(__file__).parents[2]
ALWAYS = {"qwen2", "lfm2"}  # attention, and a hybrid


@pytest.mark.native
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly)
        for name in sorted(generating())
    ],
)
def test_outputs_are_those_of_the_host(name: str) -> None:
    """
    Each model gives the tokens of the host alone in each case, or is refused; none dies.
    """
    done = subprocess.run(
        [sys.executable, "-m", "scripts.try_placements", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
