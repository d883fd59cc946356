"""Random faults in files; larger searches are scripts/mutate_*.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
N_FILES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "100"))


@pytest.mark.parametrize("script", ["mutate_gguf", "mutate_projector", "mutate_media"])
def test_no_file_ends_the_process_or_hangs(script):
    """
    A model file, projector, image or sound with faults works or is refused by an error of this package,
    in a process each.
    """
    command = [sys.executable, "-m", f"scripts.{script}", "--seed", "1"]
    done = subprocess.run(
        [*command, "--count", str(N_FILES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 + N_FILES / 2,  # below the limit of pytest by default
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-4000:]
    assert "DEFECT" not in done.stdout
