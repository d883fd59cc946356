"""The tests of llama.cpp's own server; scripts/try_llama_tests.py runs them."""

import faulthandler
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.try_llama_tests import expected, unmatched

ROOT = Path(__file__).parents[2]


def test_patterns_are_of_ids_with_brackets():
    """
    Only a star stands for other text.
    """
    ids = ["test_a.py::test[one-1]", "test_a.py::test[two-1]", "test_a.py::test"]
    fails = {"a reason": ["test_a.py::test[*-1]"], "another": ["test_b.py::*"]}
    outcomes = dict.fromkeys(ids, "passed")

    assert expected(fails, outcomes) == set(ids[:2])
    assert unmatched(fails, outcomes) == ["test_b.py::*"]


@pytest.mark.native
@pytest.mark.nightly
def test_only_those_tests_fail_that_have_a_reason():
    """
    Of all files in scope, and none of them passes.
    """
    faulthandler.cancel_dump_traceback_later()  # some 200 servers start, one by one
    done = subprocess.run(
        [sys.executable, "-m", "scripts.try_llama_tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-4000:]
