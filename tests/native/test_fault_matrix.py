"""Native calls that fail once: what `scripts/fault_matrix.py` tries, a few calls of each."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.faults.runs import runs

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
ALWAYS = "pool"  # a run takes as long as a hundred tests; all the others are by night
RUNS = [
    name if name == ALWAYS else pytest.param(name, marks=pytest.mark.nightly)
    for name in runs()
]


@pytest.mark.parametrize("name", RUNS)
def test_a_call_that_fails_hurts_only_its_request(name):
    """
    No hang, nothing left, no wrong token: at the first, second, middle and last call of each
    function that can fail.
    """
    command = [sys.executable, "-m", "scripts.fault_matrix", name, "--thin", "--values"]

    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert (done.returncode, "the process ended" in done.stdout) == (0, False), (
        done.stdout
    )
