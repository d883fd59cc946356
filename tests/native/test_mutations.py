"""Random faults in files; larger searches are scripts/mutate_*.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
SCRIPTS = ("mutate_gguf", "mutate_projector", "mutate_media")
N_FEW = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "15"))
N_MANY = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "200"))


@pytest.mark.parametrize(
    ("script", "n_files"),
    [
        *(pytest.param(script, N_FEW, id=script) for script in SCRIPTS),
        *(
            pytest.param(script, N_MANY, id=f"{script} many", marks=pytest.mark.nightly)
            for script in SCRIPTS
        ),
    ],
)
def test_no_file_ends_the_process_or_hangs(script, n_files, request):
    """
    A model file, projector, image or sound with faults works or is refused by an error of this package,
    in a process each.
    """
    if script != "mutate_gguf":
        request.getfixturevalue("media_library")
    command = [sys.executable, "-m", f"scripts.{script}", "--seed", "1"]
    done = subprocess.run(
        [*command, "--count", str(n_files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 + n_files / 2,  # below the limit of pytest by default
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-4000:]
    assert "DEFECT" not in done.stdout
