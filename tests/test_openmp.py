"""How long threads of libgomp spin: a little, unless the user has chosen."""

import logging
import os
import re
import subprocess
import sys

import pytest

from pyllama_raw._ffi.openmp import SPINS, VARIABLES, short_spins

LOAD = """
import os
from pyllama_raw.native import libllama
libllama.load()
print(sorted({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)))
"""


def spins(**chosen: str) -> tuple[int, str]:
    """What libgomp says it has read, and what a child of the process would inherit."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**env, "OMP_DISPLAY_ENV": "verbose", **chosen},
        capture_output=True,
        check=True,
        text=True,
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert found is not None, done.stderr
    return int(found[1]), done.stdout.strip()


@pytest.mark.native
def test_threads_spin_a_little():
    """
    libgomp is loaded with our count, and children inherit nothing of it.
    """
    assert spins() == (SPINS, "[]")


@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("GOMP_SPINCOUNT", "77", 77), ("OMP_WAIT_POLICY", "passive", 0)],
)
def test_a_choice_of_the_user_stays(name, value, expected):
    """
    Either variable alone is a choice.
    """
    assert spins(**{name: value}) == (expected, f"['{name}']")


@pytest.mark.parametrize(
    ("loaded", "n_lines"),
    [
        ("7f r-xp 00 08:01 7 /usr/lib/libgomp.so.1.0.0", 1),
        ("7f r-xp 00 08:01 7 /torch.libs/libgomp-a34b3233.so.1.0.0", 0),
    ],
)
def test_a_libgomp_that_is_there_already_is_told(
    loaded, n_lines, tmp_path, monkeypatch, caplog
):
    """
    Its threads spin as they did; a copy that a wheel brings is another library.
    """
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    maps = tmp_path / "maps"
    maps.write_text(loaded)

    with caplog.at_level(logging.INFO, "pyllama_raw"), short_spins(maps):
        inside = os.environ["GOMP_SPINCOUNT"]

    assert inside == str(SPINS)
    assert len(caplog.records) == n_lines
    assert "GOMP_SPINCOUNT" not in os.environ
