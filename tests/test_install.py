"""README's way to install, on a copy of the tree."""

import faulthandler
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(
    *(".*", "*.so", "*.so.*", "*.egg-info", "__pycache__", "build", "lib")
)


def shell(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run *script* in bash, where python3 is the Python of the tests."""
    python = Path(sys.base_prefix) / "bin"
    path = f"{python}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euc", script],  # noqa: S607 - the bash of whoever runs the tests
        cwd=cwd,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.native
@pytest.mark.nightly
def test_the_lines_of_readme_install(tmp_path: Path, model_path: Path):
    """
    In a fresh clone they end with what `info` shows; `python -m` there names the copy
    that the clone hides, and works from elsewhere.
    """
    # Compiling takes minutes on a busy machine; the commands have limits of their own.
    faulthandler.cancel_dump_traceback_later()
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=NOT_COPIED)
    install = (ROOT / "README.md").read_text().split("## Install\n")[1]
    lines = re.findall(r"```bash\n(.*?)```", install, re.DOTALL)[0]

    installed = shell(lines, clone)
    hidden = shell(". .venv/bin/activate && python -m pyllama_raw info", clone)
    elsewhere = shell(
        f". {clone}/.venv/bin/activate && python -m pyllama_raw info", tmp_path
    )

    assert installed.returncode == 0, installed.stderr
    assert "\nlimits\n" in installed.stdout
    assert (hidden.returncode, hidden.stdout) == (1, "")
    assert f"imports pyllama_raw from {clone}/pyllama_raw" in hidden.stderr
    assert f"{clone}/.venv/lib/python" in hidden.stderr
    assert "run `pyllama-raw`" in hidden.stderr
    assert elsewhere.returncode == 0, elsewhere.stderr
