"""Estimates of memory beside what a process takes (scripts/try_estimates.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.native
@pytest.mark.nightly
def test_an_estimate_is_near_what_a_process_takes() -> None:
    """
    Of a model whose weights and cells are much beside what each process needs.
    """
    done = subprocess.run(
        [sys.executable, "-m", "scripts.try_estimates", "default"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    _, row = done.stdout.splitlines()
    name, _, _, ratio, *_ = row.split()
    assert name == "default"
    assert 0.9 <= float(ratio) <= 1.1
